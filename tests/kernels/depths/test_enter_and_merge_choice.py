"""The kernel that chooses tokens for a depth against its reference, also where scores are equal or infinite."""

import pytest

pytest.importorskip("triton")
pytest.importorskip("hypothesis")  # a machine with a GPU may have none
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braidlm.kernels.depths.enter_and_merge import choose_tokens, plain_choose_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCORES = st.sampled_from([-float("inf"), -2.5, -1e-30, 0.0, 1e-30, 0.5, 0.50000006, 3e38, float("inf")])


@settings(max_examples=25, deadline=None)
@given(scores=st.lists(SCORES, min_size=2, max_size=20), share=st.floats(0.01, 1.0))
def test_the_highest_scores_enter_and_of_equal_ones_the_earlier(scores: list[float], share: float) -> None:
    rows = torch.tensor([scores, scores[::-1]], device=DEVICE)
    count = max(1, round(share * len(scores)))
    for ours, theirs in zip(choose_tokens(rows, count), plain_choose_tokens(rows, count), strict=True):
        assert torch.equal(ours, theirs)
