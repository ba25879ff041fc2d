"""Statistics of scores: correlations, standard errors, and whether the best model is significantly better.

A standard error is None where there are too few items to estimate one.

An item's influence is how far the score would move (to first order, times the number of items) if the item counted a
little more. Influences have the mean 0, and the score's standard error is the root of the sum of their squares, divided
by the number of items. For two models that answered the same items, the error of the difference of their scores follows
in the same way from the differences of their influences: items that are hard, or easy, for both cancel out.

The best score of a task is significantly better than the next, and bold in a table, if the two differ by more than two
standard errors of their difference. That error is paired where both results have influences; else it is the two scores'
errors in quadrature. Where it is unknown, or zero because there are too few items, nothing is significant. It is the
error of sampling items: the variance over training seeds is not in it.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.evals.results import Comparison, ModelResults, TaskResult

Table = dict[str, np.ndarray]
"""Columns of numbers, NaN where a number is missing."""


def percentage_error(rate: float, count: int) -> float | None:
    """The error of a percentage of `count` items, given as a rate between 0 and 1."""
    return 100 * math.sqrt(rate * (1 - rate) / count) if count > 1 else None


def ratio_error(numerators: np.ndarray, denominators: np.ndarray, ratio: float) -> float | None:
    """The error of a ratio of sums over documents, such as bits per byte; the documents are the random sample."""
    count = len(numerators)
    if count < 2:
        return None
    residuals = numerators - ratio * denominators
    return float(math.sqrt(count / (count - 1) * np.square(residuals).sum()) / denominators.sum())


def pearson_error(correlation: float, count: int) -> float | None:
    """The error of Pearson's correlation."""
    return math.sqrt((1 - correlation**2) / (count - 2)) if count > 2 else None


def spearman_error(correlation: float, count: int) -> float | None:
    """The error of Spearman's correlation (Bonett and Wright, 2000)."""
    if count < 4:
        return None
    return (1 - correlation**2) * math.sqrt((1 + correlation**2 / 2) / (count - 3))


def jackknife_error(table: Table, groups: np.ndarray, statistic: Callable[[Table], float]) -> float | None:
    """The error of any statistic of a table, from leaving out one group of rows at a time."""
    names = np.unique(groups)
    if len(names) < 2:
        return None
    values = np.array([statistic({key: column[groups != name] for key, column in table.items()}) for name in names])
    return math.sqrt((len(values) - 1) / len(values) * float(np.square(values - values.mean()).sum()))


INFLUENCE = "influence"
"""The key of a result's `items` that holds them."""
DIGITS = 5


def mean_influences(values: np.ndarray | Sequence[float]) -> list[float]:
    """The influences on a score that is the mean over all items."""
    values = np.asarray(values, dtype=np.float64)
    return np.round(values - values.mean(), DIGITS).tolist()


def set_influences(
    values: np.ndarray | Sequence[float], sets: Sequence[str], weights: Mapping[str, float]
) -> list[float]:
    """The influences on a score that is a weighted sum of the means of sets."""
    values = np.asarray(values, dtype=np.float64)
    numbers = {name: number for number, name in enumerate(weights)}
    of = np.array([numbers[name] for name in sets])
    counts = np.maximum(np.bincount(of, minlength=len(weights)), 1)
    means = np.bincount(of, values, len(weights)) / counts
    scale = np.array(list(weights.values())) * len(values) / counts
    return np.round(scale[of] * (values - means[of]), DIGITS).tolist()


def ratio_influences(numerators: np.ndarray, denominators: np.ndarray) -> list[float]:
    """The influences on a score that is a ratio of sums, such as bits per byte."""
    residuals = numerators - numerators.sum() / denominators.sum() * denominators
    return np.round(residuals * len(numerators) / denominators.sum(), DIGITS).tolist()


def difference_error(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The standard error of the difference of two scores on the same items; None for a single item."""
    count = len(first)
    if count < 2 or count != len(second):
        return None
    differences = np.asarray(first) - np.asarray(second)
    return float(np.sqrt(np.square(differences).sum() * count / (count - 1)) / count)


THRESHOLD = 2.0
"""Standard errors of a difference beyond which it is significant."""


def compare_best(models: Sequence[ModelResults]) -> dict[str, Comparison]:
    """The best and the next model of each task, where there are several models."""
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
    one, other = (results[name].items.get(INFLUENCE, []) for name in (best, second))
    errors = [error for name in (best, second) if (error := results[name].standard_error) is not None]
    paired = bool(one and other and len(one) == len(other))
    error = difference_error(one, other) if paired else math.hypot(*errors) if len(errors) == 2 else None
    clear = error is not None and error > 0 and difference > THRESHOLD * error
    return Comparison(best, second, difference, error, paired, clear)


def check_scipy() -> None:
    """Raise an error before any model runs if SciPy is not installed."""
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise BraidError("this task needs scipy", todo="`pip install 'braidlm[eval]'` gets it.") from None


def _correlation(name: str, x: np.ndarray, y: np.ndarray) -> float:
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    check_scipy()
    from scipy import stats

    return float(getattr(stats, name)(x, y).statistic)


pearson, spearman = functools.partial(_correlation, "pearsonr"), functools.partial(_correlation, "spearmanr")
"""Pearson's correlation, and Spearman's of ranks; 0, where SciPy gives NaN, if either side is constant."""
