"""Standard errors of scores; None where there are too few items to estimate one."""

import math
from collections.abc import Callable

import numpy as np

Table = dict[str, np.ndarray]
"""Columns of numbers, NaN where a number is missing."""


def percentage_error(rate: float, count: int) -> float | None:
    """Of a percentage of `count` items, given as a rate between 0 and 1."""
    return 100 * math.sqrt(rate * (1 - rate) / count) if count > 1 else None


def ratio_error(numerators: np.ndarray, denominators: np.ndarray, ratio: float) -> float | None:
    """Of a ratio of sums over documents, such as bits per byte; the documents are the random sample."""
    count = len(numerators)
    if count < 2:
        return None
    residuals = numerators - ratio * denominators
    return float(math.sqrt(count / (count - 1) * np.square(residuals).sum()) / denominators.sum())


def pearson_error(correlation: float, count: int) -> float | None:
    """Of Pearson's correlation."""
    return math.sqrt((1 - correlation**2) / (count - 2)) if count > 2 else None


def spearman_error(correlation: float, count: int) -> float | None:
    """Of Spearman's correlation (Bonett and Wright, 2000)."""
    if count < 4:
        return None
    return (1 - correlation**2) * math.sqrt((1 + correlation**2 / 2) / (count - 3))


def jackknife_error(table: Table, groups: np.ndarray, statistic: Callable[[Table], float]) -> float | None:
    """Of any statistic of a table, from leaving out one group of rows at a time."""
    names = np.unique(groups)
    if len(names) < 2:
        return None
    values = np.array([statistic({key: column[groups != name] for key, column in table.items()}) for name in names])
    return math.sqrt((len(values) - 1) / len(values) * float(np.square(values - values.mean()).sum()))
