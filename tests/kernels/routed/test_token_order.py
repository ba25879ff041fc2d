"""Rows in the order of their tokens and back, against torch's operations."""

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels.routed.token_order import ToRows, ToTokens, plain_to_rows, plain_to_tokens, to_rows
from tests.kernels.comparison import assert_equal_with_gradients
from tests.kernels.sorted_rows import CASES, permuted, real_rows, with_padding


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_order_of_tokens_equals_torch(case: str, kv_heads: int, device: str, dtype: torch.dtype) -> None:
    permutation, chosen = permuted(case, device)
    real, width = real_rows(permutation), 24
    rows = torch.randn(len(real), width, device=device).to(dtype)
    assert_equal_with_gradients(
        lambda r: ToTokens.apply(with_padding(r, permutation, False), permutation, kv_heads, None),
        lambda r: plain_to_tokens(with_padding(r, permutation, False), permutation, kv_heads),
        [rows],
        dtype,
    )
    tokens = torch.randn(len(chosen), chosen.shape[1] * width, device=device).to(dtype)
    assert_equal_with_gradients(
        lambda t: ToRows.apply(t, permutation, kv_heads, None)[real],
        lambda t: plain_to_rows(t, permutation, kv_heads)[real],
        [tokens],
        dtype,
    )


@pytest.mark.parametrize("case", CASES)
def test_padding_of_sorted_rows_is_zeros(case: str, device: str) -> None:
    """The gradient of a bank's matrix is a sum over whole tiles."""
    permutation, chosen = permuted(case, device)
    rows = to_rows(torch.randn(len(chosen), chosen.shape[1] * 8, device=device), permutation, 1)
    used = int(permutation.expert_offsets[-1])
    assert not rows[:used][permutation.source[:used] < 0].any()
