"""Comparisons that hang on less than float32 can tell: settled in float64, so that every machine decides alike.

Of two sums that differ by less than `CLOSE`, which is larger may depend on the size of a batch or the kind of device,
as the order of additions does. Those few (some pairs in ten thousand) are scored again, one by one, in float64.
"""

from collections.abc import Sequence

import numpy as np

from braidlm.evals.scoring.forest import Request
from braidlm.evals.scoring.scorer import Scorer, Scores

CLOSE = 1e-3
"""Nats: some hundred times the rounding of a sentence's sum in float32."""


def settled(
    scorer: Scorer,
    requests: Sequence[Request],
    sums: np.ndarray,
    groups: Sequence[Sequence[int]],
    lengths: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """The sums, exact for every group (of indices of requests) whose two best are closer than `CLOSE`.

    With `lengths` also those whose two best by sum and length are, as far as the rounding of a sum goes. Scores that
    were asked for in a narrower type than float32 stay as they are.
    """
    if not scorer.settles:
        return sums
    unsure = [index for at in _unsure(sums, groups, lengths) for index in groups[at]]
    if not unsure:
        return sums
    sums = sums.copy()
    sums[unsure] = scorer.exact([requests[index] for index in unsure]).sums
    return sums


def most_probable(scorer: Scorer, requests: Sequence[Request], scores: Scores) -> np.ndarray:
    """[requests] whether each token that was scored (with leads) is the most probable one, so that greedy decoding
    would have written them; exact where a lead is less than `CLOSE`."""
    assert scores.leads is not None
    least = _least(scores.leads, scores.bounds)
    unsure = np.flatnonzero(np.abs(least) < CLOSE) if scorer.settles else np.empty(0, dtype=np.int64)
    if len(unsure):
        exact = scorer.exact([requests[index] for index in unsure.tolist()], leads=True)
        assert exact.leads is not None
        least[unsure] = _least(exact.leads, exact.bounds)
    return least > 0


def _least(leads: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The smallest lead of each request; one without tokens has none, and leads by nothing."""
    found = np.full(len(bounds) - 1, -np.inf)
    some = np.diff(bounds) > 0
    if some.any():
        found[some] = np.minimum.reduceat(leads, bounds[:-1][some])
    return found


def _unsure(sums: np.ndarray, groups: Sequence[Sequence[int]], lengths: Sequence[np.ndarray]) -> list[int]:
    """Which groups, all of one size at a time."""
    found: list[np.ndarray] = []
    sizes = np.array([len(group) for group in groups])
    for size in np.unique(sizes[sizes > 1]):
        which = np.flatnonzero(sizes == size)
        some = np.array([groups[at] for at in which.tolist()])
        near = _close(sums[some], CLOSE)
        for each in lengths:
            near |= _close(sums[some] / each[some], CLOSE / each[some].min(-1))
        found.append(which[near])
    return sorted(np.concatenate(found).tolist()) if found else []


def _close(values: np.ndarray, close: float | np.ndarray) -> np.ndarray:
    """[groups] whether the best and the second are near; equal ones are one sequence, and nothing would part them."""
    ranked = np.sort(values, axis=-1)
    leads = ranked[:, -1] - ranked[:, -2]
    return (leads > 0) & (leads < close)
