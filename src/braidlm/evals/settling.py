"""Comparisons that hang on less than float32 can tell: settled in float64, so that every machine decides alike.

Of two sums that differ by less than `CLOSE`, which is larger may depend on the size of a batch or the kind of device,
as the order of additions does. Those few (some pairs in ten thousand) are scored again, one by one, in float64.
"""

from collections.abc import Sequence

import numpy as np
import torch

from braidlm.evals.forest import Request
from braidlm.evals.scorer import Scorer

CLOSE = 1e-3
"""Nats: some hundred times the rounding of a sentence's sum in float32."""


def settled(
    scorer: Scorer, requests: Sequence[Request], sums: np.ndarray, groups: Sequence[Sequence[int]]
) -> np.ndarray:
    """The sums, exact for every group (of indices of requests) whose two best are closer than `CLOSE`.

    Scores that were asked for in a narrower type than float32 stay as they are.
    """
    if scorer.dtype != torch.float32:
        return sums
    unsure = [index for group in groups if _close(sums[list(group)]) for index in group]
    if not unsure:
        return sums
    sums = sums.copy()
    sums[unsure] = scorer.exact([requests[index] for index in unsure]).sums
    return sums


def _close(values: np.ndarray) -> bool:
    """Whether the best and the second are near; equal ones are one sequence, and nothing would part them."""
    ranked = np.sort(values)
    return len(ranked) > 1 and 0 < ranked[-1] - ranked[-2] < CLOSE
