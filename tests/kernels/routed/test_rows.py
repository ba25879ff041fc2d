"""Additions to sorted rows and their norms, after a projection or alone, against torch's operations."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.ops.dropout import DropoutUse
from braidlm.kernels.ops.norm import NormConfig
from braidlm.kernels.routed.grouped.layers import GroupedLinear
from braidlm.kernels.routed.grouped.products import plain_grouped
from braidlm.kernels.routed.permutation import Permutation, permute
from braidlm.kernels.routed.rows import AddNormRows, ProjectAddNormRows, plain_add_norm_rows
from braidlm.kernels.side_stream import DeferredGradient
from tests.kernels.comparison import (
    TOLERANCES,
    ReadDeferred,
    assert_close,
    assert_equal_with_gradients,
    nan_in_new_memory,
)
from tests.kernels.sorted_rows import choices, matrices, permuted, real_rows, with_padding


@pytest.fixture
def permutation(device: str) -> Permutation:
    return permute(torch.stack([torch.randperm(4)[:2] for _ in range(60)]).to(device), 4, 2, tile=16)


@pytest.mark.parametrize("centred", [True, False], ids=["layer norm", "RMS norm"])
def test_add_norm_rows_equals_torch(centred: bool, permutation: Permutation, device: str, dtype: torch.dtype) -> None:
    real = (permutation.source >= 0)[:, None]
    stream = torch.randn(60, 24, device=device).to(dtype)
    delta = torch.randn(permutation.rows, 24, device=device).to(dtype)

    def rows(function: Callable[..., tuple[Tensor, ...]], s: Tensor, d: Tensor, *options: Any) -> tuple[Tensor, ...]:
        outputs = function(s, torch.where(real, d, 0.0), permutation, *options)
        return tuple(torch.where(real, x, 0.0) for x in outputs)

    assert_equal_with_gradients(
        lambda s, d: rows(AddNormRows.apply, s, d, NormConfig(1e-5, centred)),
        lambda s, d: rows(plain_add_norm_rows, s, d, 1e-5, centred),
        [stream, delta],
        dtype,
    )


def test_add_norm_rows_drops_the_same_backward(permutation: Permutation, device: str) -> None:
    real = (permutation.source >= 0)[:, None]
    ones = torch.ones(permutation.rows, 24, device=device, requires_grad=True)
    zeros = torch.zeros(60, 24, device=device, requires_grad=True)
    norm = NormConfig(1e-5, True, dropout=DropoutUse(0.25, torch.tensor([5], device=device)))
    summed, normed = AddNormRows.apply(zeros, ones, permutation, norm)
    assert abs((summed[real[:, 0]] > 0).float().mean().item() - 0.75) < 0.03
    upstream = [torch.where(real, 1.0, 0.0).expand_as(summed), torch.zeros_like(normed)]
    (gradient,) = torch.autograd.grad([summed, normed], ones, upstream)
    torch.testing.assert_close(gradient[real[:, 0]], summed.detach()[real[:, 0]])


@pytest.mark.parametrize("projects", [False, True], ids=["add", "project and add"])
@pytest.mark.parametrize("rate", [0.0, 0.25], ids=["", "dropout"])
def test_padding_rows_are_written_as_zeros(projects: bool, rate: float, device: str) -> None:
    """What reads them next multiplies them, and what new memory holds may be NaN."""
    permutation, _ = permuted("top 2, an empty expert", device)
    used = permutation.tile_expert.repeat_interleave(permutation.tile) >= 0
    padding, real = used & (permutation.source < 0), (permutation.source >= 0)[:, None]
    assert padding.any()
    stream = torch.randn(len(permutation.row_of_choice), 24, device=device, requires_grad=True)
    rows = torch.randn(permutation.rows, 24, device=device, requires_grad=True)
    weight, cast, _ = matrices(permutation.experts, 24, 24, dtype=torch.float32, device=device)
    norm = NormConfig(1e-5, True, dropout=DropoutUse(rate, torch.tensor([5], device=device) if rate else None))
    with nan_in_new_memory():
        if projects:
            outputs = ProjectAddNormRows.apply(rows, weight, cast, None, stream, permutation, norm)
        else:
            outputs = AddNormRows.apply(stream, rows, permutation, norm)
        upstream = [torch.where(real, torch.randn(x.shape, device=device), 0.0) for x in outputs]
        (gradient,) = torch.autograd.grad(outputs, rows, upstream)
    for written in (*outputs, gradient):
        assert not written[padding].any()


def check_project_add_norm_rows(
    permutation: Permutation, inputs: int, width: int, centred: bool, biased: bool, deferred: bool, dtype: torch.dtype
) -> None:
    device, real = str(permutation.source.device), real_rows(permutation)
    stream = torch.randn(len(permutation.row_of_choice), width, device=device).to(dtype)
    weight, cast, rounding = matrices(permutation.experts, inputs, width, dtype=dtype, device=device)
    rows = torch.randn(len(real), inputs, device=device).to(dtype)
    bias = torch.randn(permutation.experts, width, device=device) if biased else None
    norm = NormConfig(1e-5, centred, deferred=DeferredGradient() if deferred else None)

    def fused(r: Tensor, w: Tensor, b: Tensor | None, s: Tensor) -> tuple[Tensor, ...]:
        s = s if norm.deferred is None else ReadDeferred.apply(s, norm.deferred)
        outputs = ProjectAddNormRows.apply(with_padding(r, permutation, False), w, cast, b, s, permutation, norm)
        return outputs[0][real], outputs[1][real]

    def plain(r: Tensor, w: Tensor, b: Tensor | None, s: Tensor) -> tuple[Tensor, ...]:
        delta = plain_grouped(with_padding(r, permutation, False), w + rounding, permutation, b)
        outputs = plain_add_norm_rows(s, delta, permutation, 1e-5, centred)
        return outputs[0][real], outputs[1][real]

    assert_equal_with_gradients(fused, plain, [rows, weight, bias, stream], dtype)


@pytest.mark.parametrize(("inputs", "width"), [(40, 24), (32, 200)])
@pytest.mark.parametrize(
    ("centred", "biased", "deferred"),
    [(False, False, False), (True, True, False), (True, False, True), (False, True, True)],
    ids=["RMS norm", "layer norm, biased", "layer norm, deferred", "RMS norm, biased, deferred"],
)
def test_project_add_norm_rows_equals_torch(
    inputs: int, width: int, centred: bool, biased: bool, deferred: bool, device: str, dtype: torch.dtype
) -> None:
    permutation, _ = permuted("top 2", device)
    check_project_add_norm_rows(permutation, inputs, width, centred, biased, deferred, dtype)


def test_project_add_norm_rows_drops_what_the_two_steps_drop(device: str, dtype: torch.dtype) -> None:
    permutation, _ = permuted("top 2", device)
    real, tokens = real_rows(permutation), len(permutation.row_of_choice)
    weight, cast, _ = matrices(permutation.experts, 40, 24, dtype=dtype, device=device)
    rows = torch.randn(permutation.rows, 40, device=device).to(dtype)
    stream, bias = torch.randn(tokens, 24, device=device).to(dtype), torch.randn(permutation.experts, 24, device=device)
    norm = NormConfig(1e-5, True, dropout=DropoutUse(0.25, torch.tensor([5], device=device)))
    together = ProjectAddNormRows.apply(rows, weight, cast, bias, stream, permutation, norm)
    delta = GroupedLinear.apply(rows, weight, cast, bias, permutation, False)
    for one, two in zip(together, AddNormRows.apply(stream, delta, permutation, norm), strict=True):
        assert_close(one[real], two[real].double(), TOLERANCES[dtype], "rows after dropout")


@pytest.mark.gpu
def test_project_add_norm_rows_at_real_size() -> None:
    permutation = permute(choices(8192, 4, 2, "cuda"), 4, 16)
    for deferred in (False, True):
        check_project_add_norm_rows(permutation, 192, 192, True, True, deferred, torch.bfloat16)
