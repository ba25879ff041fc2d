"""Near ties, decided again in float64, so that every machine decides alike.

Of two sums that differ by less than `NEAR_TIE`, which is larger may depend on the size of a batch or the kind of
device, as the order of additions does. Those few (some pairs in ten thousand) are scored again, one by one, in float64.
"""

from collections.abc import Sequence

import numpy as np

from braidlm.evals.scoring.requests import Request
from braidlm.evals.scoring.scorer import Scorer, Scores

NEAR_TIE = 1e-3
"""Nats: some hundred times the rounding error of a sentence's sum in float32."""


def resolve_near_ties(
    scorer: Scorer,
    requests: Sequence[Request],
    sums: np.ndarray,
    groups: Sequence[Sequence[int]],
    lengths: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """The sums, recomputed in float64 for every group (of indices of requests) whose two best differ by a near tie.

    With `lengths` also those whose two best sums divided by length do, as far as the rounding error of a sum goes.
    Scores of a narrower type than float32 stay as they are.
    """
    return rescored(scorer, requests, sums, groups, _near_groups(sums, groups, lengths))


def rescored(
    scorer: Scorer, requests: Sequence[Request], sums: np.ndarray, groups: Sequence[Sequence[int]], near: Sequence[int]
) -> np.ndarray:
    """The sums, recomputed in float64 for the groups with these indices; only where scores are of float32."""
    indices = [index for group in near for index in groups[group]]
    if not indices or not scorer.resolves_near_ties:
        return sums
    sums = sums.copy()
    sums[indices] = scorer.score_float64([requests[index] for index in indices]).sums
    return sums


def is_greedy(scorer: Scorer, requests: Sequence[Request], scores: Scores) -> np.ndarray:
    """[requests] whether every scored token is the most probable one, so that greedy decoding would have generated it;
    decided in float64 where a margin is less than `NEAR_TIE`."""
    assert scores.margins is not None
    smallest = _smallest_margins(scores.margins, scores.bounds)
    near = np.flatnonzero(np.abs(smallest) < NEAR_TIE) if scorer.resolves_near_ties else np.empty(0, dtype=np.int64)
    if len(near):
        exact = scorer.score_float64([requests[index] for index in near.tolist()], margins=True)
        assert exact.margins is not None
        smallest[near] = _smallest_margins(exact.margins, exact.bounds)
    return smallest > 0


def _smallest_margins(margins: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """[requests] the smallest margin; minus infinity for a request without scored tokens."""
    smallest = np.full(len(bounds) - 1, -np.inf)
    scored = np.diff(bounds) > 0
    if scored.any():
        smallest[scored] = np.minimum.reduceat(margins, bounds[:-1][scored])
    return smallest


def _near_groups(sums: np.ndarray, groups: Sequence[Sequence[int]], lengths: Sequence[np.ndarray]) -> list[int]:
    """The indices of groups with a near tie, computed for all groups of one size at a time."""
    near_groups: list[np.ndarray] = []
    sizes = np.array([len(group) for group in groups])
    for size in np.unique(sizes[sizes > 1]):
        of_size = np.flatnonzero(sizes == size)
        members = np.array([groups[index] for index in of_size.tolist()])
        near = _near(sums[members], NEAR_TIE)
        for length in lengths:
            near |= _near(sums[members] / length[members], NEAR_TIE / length[members].min(-1))
        near_groups.append(of_size[near])
    return sorted(np.concatenate(near_groups).tolist()) if near_groups else []


def _near(values: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
    """[groups] whether the best and the second are near; equal ones are one sequence, which float64 cannot separate."""
    ranked = np.sort(values, axis=-1)
    margins = ranked[:, -1] - ranked[:, -2]
    return (margins > 0) & (margins < threshold)
