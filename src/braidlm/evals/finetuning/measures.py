"""Measures of answers, in percent: accuracy, F1, Matthews' correlation; Pearson's and Spearman's for numbers.

Each stands beside what always giving one and the same answer would get, and has a standard error.
"""

import math
from collections.abc import Callable

import numpy as np

RESAMPLES = 500
"""Tables drawn anew to see how far another sample of items might move a measure."""


def accuracy(table: np.ndarray) -> float:
    """Right answers of all; `table` counts [true class, answered class]."""
    return 100 * float(np.trace(table)) / float(table.sum())


def f1(table: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1."""
    both = 2 * table[1, 1]
    whole = both + table[0, 1] + table[1, 0]
    return 100 * float(both) / float(whole) if whole else 0.0


def matthews(table: np.ndarray) -> float:
    """The correlation of true and answered classes; 0 for a single answer to everything."""
    table = table.astype(float)
    true, answered, whole = table.sum(1), table.sum(0), table.sum()
    spread = (whole**2 - (true**2).sum()) * (whole**2 - (answered**2).sum())
    return 100 * float(np.trace(table) * whole - true @ answered) / math.sqrt(spread) if spread > 0 else 0.0


OF_CLASSES: dict[str, Callable[[np.ndarray], float]] = {"accuracy": accuracy, "F1": f1, "Matthews": matthews}


def pearson(answers: np.ndarray, labels: np.ndarray) -> float:
    """Linear correlation; 0 where either side never varies."""
    if np.ptp(answers) == 0 or np.ptp(labels) == 0:
        return 0.0
    return 100 * float(np.corrcoef(answers, labels)[0, 1])


def spearman(answers: np.ndarray, labels: np.ndarray) -> float:
    """Correlation of ranks."""
    return pearson(_ranks(answers), _ranks(labels))


def _ranks(values: np.ndarray) -> np.ndarray:
    """From 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


CORRELATION = "Pearson and Spearman"
"""Their mean, as GLUE has it for STS-B."""


def count_table(answers: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """[true class, answered class] how often each happened."""
    return np.bincount(labels * classes + answers, minlength=classes**2).reshape(classes, classes)


def measures(answers: np.ndarray, labels: np.ndarray, classes: int | None) -> dict[str, float]:
    """All that can be said of answers: of classes, or of numbers where `classes` is None."""
    if classes is None:
        found = {"Pearson": pearson(answers, labels), "Spearman": spearman(answers, labels)}
        return {**found, CORRELATION: sum(found.values()) / 2}
    table = count_table(answers, labels, classes)
    return {name: measure(table) for name, measure in OF_CLASSES.items() if name != "F1" or classes == 2}


def constant_answer(metric: str, labels: np.ndarray, classes: int | None) -> float:
    """What one and the same answer to everything gets: the majority class, or the one that this metric likes best."""
    if classes is None:
        return 0.0
    guesses = [np.full_like(labels, answer) for answer in range(classes)]
    return max(measures(guess, labels, classes)[metric] for guess in guesses)


def standard_error(metric: str, answers: np.ndarray, labels: np.ndarray, classes: int | None) -> float | None:
    """How far another sample of items might have moved the measure; None for a single item."""
    if len(labels) < 2:
        return None
    if classes is None:
        share = measures(answers, labels, None)[metric] / 100
        return 100 * (1 - share**2) / math.sqrt(len(labels) - 1)
    table = count_table(answers, labels, classes)
    if metric == "accuracy":
        share = accuracy(table) / 100
        return 100 * math.sqrt(share * (1 - share) / len(labels))
    drawn = np.random.default_rng(0).multinomial(len(labels), (table / table.sum()).ravel(), RESAMPLES)
    return float(np.std([OF_CLASSES[metric](each.reshape(table.shape)) for each in drawn], ddof=1))
