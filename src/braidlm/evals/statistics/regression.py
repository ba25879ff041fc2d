"""How much of the variance of reading times a model's surprisal explains beyond a baseline.

Ordinary least squares with an intercept. The gain is 100 x (R2 - R2_base) / (1 - R2_base): of what the baseline leaves
unexplained, the percentage that the predictor explains.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from braidlm.evals.statistics.standard_errors import Table


def with_interactions(table: Table, names: Sequence[str]) -> list[np.ndarray]:
    """These columns and the products of every two of them."""
    return [*(table[name] for name in names), *(table[a] * table[b] for a, b in combinations(names, 2))]


def r_squared(columns: Sequence[np.ndarray], target: np.ndarray) -> float:
    """R2 of a regression with an intercept."""
    x = np.column_stack(columns)
    x = x - x.mean(0)
    spread = x.std(0)
    x = x / np.where(spread > 0, spread, 1.0)  # the same R2, and better conditioned
    y = target - target.mean()
    weights = np.linalg.lstsq(x.T @ x, x.T @ y, rcond=None)[0]
    residual = y - x @ weights
    return 1 - float(residual @ residual) / float(y @ y)


def gain(table: Table, target: str, base: Sequence[str], predictor: str) -> float:
    """In percent; rows with a missing number are left out, of the baseline only those that it needs."""
    values = []
    for extra in ([], [predictor]):
        complete = ~np.isnan(np.column_stack([table[name] for name in (target, *base, *extra)])).any(1)
        rows = {name: column[complete] for name, column in table.items()}
        columns = [*with_interactions(rows, base), *(rows[name] for name in extra)]
        values.append(r_squared(columns, rows[target]))
    baseline, extended = values
    return 100 * (extended - baseline) / (1 - baseline)
