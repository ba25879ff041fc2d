"""Accuracy over sets: the percentage of each, and means of those, as the BabyLM pipeline computes them."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from braidlm.evals.results import Part, TaskResult
from braidlm.evals.statistics.influence import INFLUENCE, set_influences


def set_accuracy(
    task: str,
    metric: str,
    sets: Sequence[str],
    right: Sequence[bool],
    chances: Sequence[float],
    splits: Mapping[str, str] | None = None,
) -> TaskResult:
    """The mean over sets of the percentage that is right; where sets belong to splits, first over those of a split.

    `sets` has the set of each item, `chances` the probability that a guess is right.
    """
    guesses: dict[str, list[float]] = {}
    for name, chance in zip(sets, chances, strict=True):
        guesses.setdefault(name, []).append(chance)
    parts = percentages(sets, right)
    weights = _weights(list(parts), splits or {})
    # The variance of a weighted mean: that of its parts, each times the square of its weight.
    variance = sum(weights[name] ** 2 * _variance(part) for name, part in parts.items())
    return TaskResult(
        task=task,
        metric=metric,
        score=sum(weights[name] * part.score for name, part in parts.items()),
        count=len(sets),
        standard_error=100 * math.sqrt(variance),
        chance=round(100 * sum(weights[name] * float(np.mean(values)) for name, values in guesses.items()), 6),
        parts=parts,
        notes={"sets": len(parts)},
        items={INFLUENCE: set_influences(100.0 * np.array(right, dtype=np.float64), sets, weights)},
    )


def percentages(groups: Iterable[str | None], right: Iterable[bool]) -> dict[str, Part]:
    """The accuracy of each group, in the order of their names; `groups` has the group of each item, if it has one."""
    hits: dict[str, list[bool]] = {}
    for name, hit in zip(groups, right, strict=True):
        if name is not None:
            hits.setdefault(name, []).append(bool(hit))
    return {name: Part(100 * sum(some) / len(some), len(some)) for name, some in sorted(hits.items())}


def _weights(sets: Sequence[str], splits: Mapping[str, str]) -> dict[str, float]:
    of = {name: splits.get(name, "") for name in sets}
    sizes = {split: sum(other == split for other in of.values()) for split in of.values()}
    return {name: 1 / (len(sizes) * sizes[split]) for name, split in of.items()}


def _variance(part: Part) -> float:
    rate = part.score / 100
    return rate * (1 - rate) / part.count
