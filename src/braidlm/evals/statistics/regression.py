"""How much of reading times a model's surprisal explains beyond what is known of the words anyway.

Ordinary least squares with an intercept. The gain is 100 x (R2 - R2_base) / (1 - R2_base): of what the baseline leaves
unexplained, the percentage that the predictor explains.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

Table = dict[str, np.ndarray]
"""Columns of numbers, NaN where a number is missing."""


def with_products(table: Table, names: Sequence[str]) -> list[np.ndarray]:
    """These columns and the products of every two of them."""
    return [*(table[name] for name in names), *(table[a] * table[b] for a, b in combinations(names, 2))]


def explained(columns: Sequence[np.ndarray], target: np.ndarray) -> float:
    """R2 of a regression with an intercept."""
    x = np.column_stack(columns)
    x = x - x.mean(0)
    spread = x.std(0)
    x = x / np.where(spread > 0, spread, 1.0)  # the same R2, and products of columns of one size
    y = target - target.mean()
    moments = x.T @ y
    weights = np.linalg.lstsq(x.T @ x, moments, rcond=None)[0]
    residual = y - x @ weights
    return 1 - float(residual @ residual) / float(y @ y)


def gain(table: Table, target: str, base: Sequence[str], predictor: str) -> float:
    """In percent; rows in which a number is missing are left out, of the baseline those that it needs."""
    values = []
    for extra in ([], [predictor]):
        whole = ~np.isnan(np.column_stack([table[name] for name in (target, *base, *extra)])).any(1)
        rows = {name: column[whole] for name, column in table.items()}
        columns = [*with_products(rows, base), *(rows[name] for name in extra)]
        values.append(explained(columns, rows[target]))
    plain, better = values
    return 100 * (better - plain) / (1 - plain)


def jackknife_error(table: Table, groups: np.ndarray, statistic: Callable[[Table], float]) -> float | None:
    """The standard error of a statistic from leaving out one group of rows at a time; None for a single group."""
    names = np.unique(groups)
    if len(names) < 2:
        return None
    values = np.array([statistic({key: column[groups != name] for key, column in table.items()}) for name in names])
    return math.sqrt((len(values) - 1) / len(values) * float(np.square(values - values.mean()).sum()))
