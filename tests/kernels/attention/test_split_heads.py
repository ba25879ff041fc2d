"""Queries, keys and values of one product, rotated or not, against torch's operations."""

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels.attention.split_heads import SplitHeads, plain_split_heads
from braidlm.kernels.ops.column_sums import ColumnSums
from tests.kernels.comparison import TOLERANCES, assert_close, assert_equal_with_gradients
from tests.kernels.rotary_tables import rotary_tables


@pytest.mark.parametrize(
    ("dim", "query_heads", "kv_heads"), [(16, 2, 2), (24, 2, 1), (16, 9, 3)], ids=["pairs", "one key", "many heads"]
)
@pytest.mark.parametrize("rotation", [None, "halves", "interleaved", "of each row"])
def test_split_heads_equals_torch(
    dim: int, query_heads: int, kv_heads: int, rotation: str | None, device: str, dtype: torch.dtype
) -> None:
    time, heads, interleaved = 70, query_heads + 2 * kv_heads, rotation == "interleaved"
    qkv = torch.randn(3, time, heads, dim, device=device).to(dtype)
    index = torch.randint(90, (3 * time,), device=device) if rotation == "of each row" else None
    tables = rotary_tables(time if index is None else 90, dim, interleaved, device)
    rotary = None if rotation is None else (*tables, index)
    assert_equal_with_gradients(
        lambda x: SplitHeads.apply(x, None, rotary, interleaved, kv_heads, ColumnSums(1), None),
        lambda x: plain_split_heads(x, rotary, interleaved, kv_heads),
        [qkv],
        dtype,
    )
    bias = torch.zeros(heads * dim, device=device, requires_grad=True)
    leaf = qkv.detach().requires_grad_()
    parts = SplitHeads.apply(leaf, bias, rotary, interleaved, kv_heads, ColumnSums(1), None)
    sum((p * torch.randn_like(p)).sum() for p in parts).backward()
    expected = leaf.grad.double().sum((0, 1)).flatten()
    assert_close(bias.grad, expected, TOLERANCES[dtype], "gradient of the bias")
