"""The weighted sum of each token's rows against torch's operations."""

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.routed.combine import Combine, combine, plain_combine
from braidlm.kernels.routed.permutation import Permutation, permute
from tests.kernels.comparison import TOLERANCES, assert_close, assert_equal_with_gradients
from tests.kernels.sorted_rows import CASES, choices, permuted, real_rows, with_padding


def check_combine(permutation: Permutation, chosen: Tensor, width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(len(real_rows(permutation)), width, device=chosen.device).to(dtype)
    weights = torch.rand(chosen.shape, device=chosen.device)
    assert_equal_with_gradients(
        lambda r, w: Combine.apply(with_padding(r, permutation, False), w, permutation),
        lambda r, w: plain_combine(with_padding(r, permutation, False), w, permutation),
        [rows, weights],
        dtype,
    )
    rows = with_padding(rows, permutation, False)
    leaf, used = rows.clone().requires_grad_(), int(permutation.expert_offsets[-1])
    Combine.apply(leaf, weights, permutation).backward(torch.randn(len(chosen), width, device=rows.device).to(dtype))
    assert not leaf.grad[:used][permutation.source[:used] < 0].any(), "padding rows must have a gradient of zeros"
    expected = plain_combine(rows.double(), torch.ones_like(weights), permutation)
    assert_close(combine(rows, None, permutation), expected, TOLERANCES[dtype], "the sum of a token's rows")


@pytest.mark.parametrize("case", CASES)
def test_combine_equals_torch(case: str, device: str, dtype: torch.dtype) -> None:
    check_combine(*permuted(case, device), 24, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "width"), [(4, 192), (8, 384)])
def test_combine_equals_torch_at_real_size(experts: int, width: int) -> None:
    chosen = choices(8192, experts, 2, "cuda")
    check_combine(permute(chosen, experts, 16), chosen, width, torch.bfloat16)
