"""Is the best score significantly better than the next? Only then does a table set it in bold.

The threshold is two standard errors of the difference of the two scores. The error is paired where a task gives the
influence of each item (`influence.py`), since both models answered the same items; else it is the two scores' errors in
quadrature. Where the error is unknown, or zero because there are too few items, nothing is significant. It is the error
of sampling items: the variance over training seeds is not in it.
"""

import math
from collections.abc import Sequence

from braidlm.evals.results import Comparison, ModelResults, TaskResult
from braidlm.evals.statistics.influence import INFLUENCE, difference_error

THRESHOLD = 2.0
"""Standard errors of a difference beyond which it is significant."""


def compare_best(models: Sequence[ModelResults]) -> dict[str, Comparison]:
    """By task, where there are several models."""
    comparisons = {}
    for task in models[0].tasks:
        results = {model.name: model.tasks[task] for model in models if not math.isnan(model.tasks[task].score)}
        if len(results) > 1:
            comparisons[task] = _comparison(results)
    return comparisons


def _comparison(results: dict[str, TaskResult]) -> Comparison:
    sign = 1 if next(iter(results.values())).higher_is_better else -1
    best, second = sorted(results, key=lambda name: -sign * results[name].score)[:2]
    difference = sign * (results[best].score - results[second].score)
    error, paired = _error(results[best], results[second])
    clear = error is not None and error > 0 and difference > THRESHOLD * error
    return Comparison(best, second, difference, error, paired, clear)


def _error(best: TaskResult, second: TaskResult) -> tuple[float | None, bool]:
    one, other = best.items.get(INFLUENCE), second.items.get(INFLUENCE)
    if one and other and len(one) == len(other):
        return difference_error(one, other), True
    if best.standard_error is None or second.standard_error is None:
        return None, False
    return math.hypot(best.standard_error, second.standard_error), False
