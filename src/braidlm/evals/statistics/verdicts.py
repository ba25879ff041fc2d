"""Is the best score better than the next by more than the noise? Only then does a table set it in bold.

The noise is two standard errors of the difference of the two scores: paired, where a task says how each item moves the
score (`influence.py`), since both models answered the same items; else the errors of the two scores in quadrature. An
error that is unknown, or zero because there are too few items to tell, proves nothing. It is the noise of the items:
what another seed of training would have given is not in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from braidlm.evals.reports.results import ModelResults, TaskResult
from braidlm.evals.statistics.influence import KEY, difference_error

CLEAR = 2.0
"""Standard errors of a difference beyond which it counts."""


@dataclass(frozen=True)
class Verdict:
    """The best model of a task and the next."""

    best: str
    next: str
    difference: float
    """By how much the best is better, in the units of the score."""
    standard_error: float | None
    """Of that difference."""
    paired: bool
    """Whether it was made item by item."""
    clear: bool
    """Whether the difference is larger than the noise."""


def verdicts(models: Sequence[ModelResults]) -> dict[str, Verdict]:
    """By task, where there are several models."""
    found = {}
    for task in models[0].tasks:
        results = {model.name: model.tasks[task] for model in models if not math.isnan(model.tasks[task].score)}
        if len(results) > 1:
            found[task] = _verdict(results)
    return found


def _verdict(results: dict[str, TaskResult]) -> Verdict:
    sign = 1 if next(iter(results.values())).higher_is_better else -1
    best, second = sorted(results, key=lambda name: -sign * results[name].score)[:2]
    difference = sign * (results[best].score - results[second].score)
    error, paired = _error(results[best], results[second])
    clear = error is not None and error > 0 and difference > CLEAR * error
    return Verdict(best, second, difference, error, paired, clear)


def _error(first: TaskResult, second: TaskResult) -> tuple[float | None, bool]:
    mine, theirs = first.items.get(KEY), second.items.get(KEY)
    if mine and theirs and len(mine) == len(theirs):
        return difference_error(mine, theirs), True
    if first.standard_error is None or second.standard_error is None:
        return None, False
    return math.hypot(first.standard_error, second.standard_error), False
