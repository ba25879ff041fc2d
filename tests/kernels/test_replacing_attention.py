"""Compact attention of some queries against torch's attention of all of them: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.kernels import replacing
from braidlm.kernels.replacing import CpuStackedLinear
from braidlm.model.routing.dispatch import Permutation, sort_by_expert

MEMBERS, BATCH, TIME, HEADS, SIZE = 3, 2, 21, 2, 4


def choices(kind: str) -> Tensor:
    """[token, choice]."""
    if kind == "one never chosen":
        return torch.tensor([[0], [2]]).repeat(BATCH * TIME // 2, 1)
    if kind == "one has all":
        return torch.full((BATCH * TIME, 1), 1)
    top_k = int(kind[-1])
    return torch.rand(BATCH * TIME, MEMBERS, generator=torch.Generator().manual_seed(0)).topk(top_k).indices


def full_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)), is_causal=True)
    return output.transpose(1, 2)


def rows_of(permutation: Permutation, values_STNH: Tensor) -> Tensor:
    return permutation.gather_per_expert(values_STNH.reshape(MEMBERS, BATCH * TIME, HEADS * SIZE)).unflatten(
        1, (HEADS, SIZE)
    )


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("kind", ["top 1", "top 2", "top 3", "one never chosen", "one has all"])
def test_it_equals_full_attention_at_the_rows(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "CHUNK", chunk)
    permutation, generator = sort_by_expert(choices(kind), MEMBERS), torch.Generator().manual_seed(1)
    results = []
    streams = torch.randn(3, MEMBERS * BATCH, TIME, HEADS, SIZE, dtype=torch.float64, generator=generator)
    for compact in (True, False):
        query, key, value = (x.clone().requires_grad_() for x in streams)
        if compact:
            output = replacing.compact_attention(rows_of(permutation, query), key, value, permutation)
        else:
            output = rows_of(permutation, full_attention(query, key, value))
        (output * torch.arange(output.numel()).view_as(output)).sum().backward()
        results.append([output.detach(), query.grad, key.grad, value.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-9)


def test_it_supports_long_sequences_in_float32_and_float64() -> None:
    query = torch.zeros(5, 4)
    assert replacing.supports_compact_attention(query, 128)
    assert replacing.supports_compact_attention(query.double(), 128)
    assert not replacing.supports_compact_attention(query, 127)
    assert not replacing.supports_compact_attention(query.bfloat16(), 128)
    assert not replacing.supports_compact_attention(query.to("meta"), 128)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["top 1", "top 3", "one never chosen"])
def test_grouped_rows_equal_products_one_by_one(kind: str, bias: bool) -> None:
    """On a CPU the output is written in place; under autocast it is concatenated."""
    linear = CpuStackedLinear(MEMBERS, 6, 10, bias).double()
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    permutation = sort_by_expert(choices(kind), MEMBERS)
    columns, results = slice(2, 9), []
    for method in ("in place", "by hand"):
        linear.zero_grad()
        generator = torch.Generator().manual_seed(2)
        rows = torch.randn(len(permutation.source_R), 6, dtype=torch.float64, generator=generator)
        rows.requires_grad_()
        if method == "in place":
            output = linear(rows, permutation.groups, columns)
        else:
            output = torch.stack(
                [row @ linear.weight[e, :, columns] for row, e in zip(rows, permutation.expert_R, strict=True)]
            )
            output = output if linear.bias is None else output + linear.bias[permutation.expert_R, columns]
        output.square().sum().backward()
        results.append([output.detach(), rows.grad, *(p.grad.clone() for p in linear.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-10)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = linear.float()(rows.detach().float(), permutation.groups, columns)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), results[0][0], rtol=0.05, atol=0.1)
