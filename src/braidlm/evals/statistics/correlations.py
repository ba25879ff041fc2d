"""Correlations of Pearson and Spearman with their standard errors."""

import math

import numpy as np


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[which]


def pearson(one: np.ndarray, other: np.ndarray) -> float:
    """Between -1 and 1; 0 where one of them does not vary at all."""
    x, y = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt(float(x @ x) * float(y @ y))
    return 0.0 if size == 0 else max(-1.0, min(1.0, float(x @ y) / size))


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's correlation of the ranks."""
    return pearson(ranks(one), ranks(other))


def pearson_error(correlation: float, count: int) -> float | None:
    """Its standard error; None for too few to say."""
    return math.sqrt((1 - correlation**2) / (count - 2)) if count > 2 else None


def spearman_error(correlation: float, count: int) -> float | None:
    """Its standard error (Bonett and Wright, 2000); None for too few to say."""
    if count < 4:
        return None
    return (1 - correlation**2) * math.sqrt((1 + correlation**2 / 2) / (count - 3))
