"""The influence of each item on a score, from which the standard error of a difference between two models follows.

An item's influence is how far the score would move (to first order, times the number of items) if the item counted a
little more. Influences have the mean 0, and the score's standard error is the root of the sum of their squares, divided
by the number of items. For two models that answered the same items, the error of the difference of their scores follows
in the same way from the differences of their influences: items that are hard, or easy, for both cancel out.
"""

from collections.abc import Mapping, Sequence

import numpy as np

INFLUENCE = "influence"
"""The key of a result's `items` that holds them."""
DIGITS = 5


def mean_influences(values: np.ndarray | Sequence[float]) -> list[float]:
    """For a score that is the mean over all items."""
    values = np.asarray(values, dtype=np.float64)
    return _rounded(values - values.mean())


def set_influences(
    values: np.ndarray | Sequence[float], sets: Sequence[str], weights: Mapping[str, float]
) -> list[float]:
    """For a score that is a weighted sum of the means of sets."""
    values = np.asarray(values, dtype=np.float64)
    names = list(weights)
    numbers = {name: number for number, name in enumerate(names)}
    of = np.array([numbers[name] for name in sets])
    counts = np.bincount(of, minlength=len(names))
    means = np.bincount(of, values, len(names)) / np.maximum(counts, 1)
    scale = np.array([weights[name] for name in names]) * len(values) / np.maximum(counts, 1)
    return _rounded(scale[of] * (values - means[of]))


def ratio_influences(numerators: np.ndarray, denominators: np.ndarray) -> list[float]:
    """For a score that is a ratio of sums, such as bits per byte."""
    residuals = numerators - numerators.sum() / denominators.sum() * denominators
    return _rounded(residuals * len(numerators) / denominators.sum())


def difference_error(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The standard error of the difference of two scores on the same items; None for a single item."""
    count = len(first)
    if count < 2 or count != len(second):
        return None
    differences = np.asarray(first) - np.asarray(second)
    return float(np.sqrt(np.square(differences).sum() * count / (count - 1)) / count)


def _rounded(values: np.ndarray) -> list[float]:
    return np.round(values, DIGITS).tolist()
