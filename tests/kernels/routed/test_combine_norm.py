"""The norm of the stream with experts' weighted sum, against the sum and the norm apart."""

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.context import PendingAdd
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.dropout import DropoutUse
from braidlm.kernels.ops.norm import AddNorm, NormConfig, plain_add_norm
from braidlm.kernels.routed.combine import CombineAddNorm, UncombinedSum, combine, plain_combine
from tests.kernels.comparison import TOLERANCES, assert_close
from tests.kernels.sorted_rows import CASES, permuted, real_rows, with_padding

WIDTH = 24


def uncombined_sum(case: str, based: bool, device: str, dtype: torch.dtype) -> UncombinedSum:
    permutation, chosen = permuted(case, device)
    rows = torch.randn(len(real_rows(permutation)), WIDTH, device=device).to(dtype)
    weights = torch.rand(chosen.shape, device=device)
    base = torch.randn(len(chosen), WIDTH, device=device).to(dtype) if based else None
    row_weights = torch.full((permutation.rows,), -1.0, device=device)
    uncombined = UncombinedSum()
    uncombined.inputs = (with_padding(rows, permutation, False), weights, permutation, base, row_weights)
    return uncombined


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("centred", "based"), [(True, True), (False, False)], ids=["layer norm", "RMS norm, no base"])
def test_the_norm_of_a_sum_equals_torch(case: str, centred: bool, based: bool, device: str, dtype: torch.dtype) -> None:
    """The tensor that stands for the sum is never read; the weights of rows are those that `combine` writes."""
    uncombined = uncombined_sum(case, based, device, dtype)
    assert uncombined.inputs is not None
    rows, weights, permutation, base, row_weights = uncombined.inputs
    wide = plain_combine(rows.double(), weights.double(), permutation)
    wide = wide if base is None else wide + base.double()
    bias = torch.randn(WIDTH, device=device) if centred else None
    inputs = [torch.randn_like(wide).to(dtype), wide, *torch.randn(2, WIDTH, device=device), bias]
    ours, theirs = (
        [None if x is None else x.detach().to(kind or x.dtype).requires_grad_() for x in inputs]
        for kind in (None, torch.float64)
    )
    ours[1] = torch.full_like(wide, torch.nan).to(dtype).requires_grad_()
    actual = CombineAddNorm.apply(*ours, NormConfig(1e-5, centred, ColumnSums(1)), uncombined)
    expected = plain_add_norm(*theirs, 1e-5, centred)
    upstream = [torch.randn_like(x) for x in actual]
    leaves = [i for i, x in enumerate(inputs) if x is not None]
    our_gradients = torch.autograd.grad(actual, [ours[i] for i in leaves], upstream)
    their_gradients = torch.autograd.grad(expected, [theirs[i] for i in leaves], [u.double() for u in upstream])
    for what, a, e in zip(
        ["sum", "normalised", *leaves], [*actual, *our_gradients], [*expected, *their_gradients], strict=True
    ):
        assert_close(a, e, 2 * TOLERANCES[dtype], str(what))
    again = torch.full_like(row_weights, -1.0)
    combine(rows, weights, permutation, base, again)
    assert torch.equal(row_weights, again)
    assert uncombined.inputs is None, "the rows are held no longer"


def test_dropout_is_that_of_the_norm_alone(device: str, dtype: torch.dtype) -> None:
    uncombined = uncombined_sum("top 2", True, device, dtype)
    delta = combine(*uncombined.inputs)
    stream, seed = torch.randn_like(delta), torch.tensor([7], device=device)
    vectors = torch.randn(3, WIDTH, device=device)

    def arguments() -> tuple[Tensor | NormConfig, ...]:
        return (stream, delta, *vectors, NormConfig(1e-5, True, ColumnSums(1), dropout=DropoutUse(0.4, seed)))

    for ours, theirs in zip(CombineAddNorm.apply(*arguments(), uncombined), AddNorm.apply(*arguments()), strict=True):
        assert_close(ours, theirs.double(), 2 * TOLERANCES[dtype], "after dropout")


def test_a_reader_that_is_no_norm_gets_the_sum(device: str, dtype: torch.dtype) -> None:
    uncombined = uncombined_sum("top 2", True, device, dtype)
    expected = combine(*uncombined.inputs)
    pending = PendingAdd(torch.full_like(expected, torch.nan), uncombined=uncombined)
    for _ in range(2):
        assert torch.equal(pending.fields[0], expected)
