"""By how much each item moves a score: what the error of a difference between two models comes from.

The influence of an item is how far the score would move (to first order, times the number of items) if it counted a
little more; influences have the mean 0, and the score's standard error is the root of the sum of their squares, divided
by the number of items. Two models that answered the same items differ by something whose error is made in the same way
of the differences of their influences: what is hard for both, or easy for both, says nothing of the difference.
"""

from collections.abc import Mapping, Sequence

import numpy as np

KEY = "influence"
"""Under this name a result's `items` hold them."""
DIGITS = 5


def of_mean(values: np.ndarray | Sequence[float]) -> list[float]:
    """Where the score is the mean over all items."""
    given = np.asarray(values, dtype=np.float64)
    return _kept(given - given.mean())


def of_sets(values: np.ndarray | Sequence[float], sets: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """Where the score is a weighted sum of the means of sets."""
    given = np.asarray(values, dtype=np.float64)
    names = list(weights)
    place = {name: at for at, name in enumerate(names)}
    of = np.array([place[name] for name in sets])
    counts = np.bincount(of, minlength=len(names))
    means = np.bincount(of, given, len(names)) / np.maximum(counts, 1)
    scale = np.array([weights[name] for name in names]) * len(given) / np.maximum(counts, 1)
    return _kept(scale[of] * (given - means[of]))


def of_ratio(over: np.ndarray, under: np.ndarray) -> list[float]:
    """Where the score is a sum divided by another, as bits are by bytes."""
    residual = over - over.sum() / under.sum() * under
    return _kept(residual * len(over) / under.sum())


def difference_error(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The standard error of the difference of two scores on the same items; None where there is but one."""
    count = len(first)
    if count < 2 or count != len(second):
        return None
    apart = np.asarray(first) - np.asarray(second)
    return float(np.sqrt(np.square(apart).sum() * count / (count - 1)) / count)


def _kept(values: np.ndarray) -> list[float]:
    return np.round(values, DIGITS).tolist()
