"""Metrics in percent: accuracy, F1, Matthews' correlation; Pearson's and Spearman's for numbers.

Each has a standard error, and the score of a constant answer as its baseline.
"""

import math
from collections.abc import Callable

import numpy as np

from braidlm.evals.statistics.from_scipy import pearson, spearman

RESAMPLES = 500
"""Bootstrap samples of a confusion matrix, for a metric's standard error."""


def accuracy(table: np.ndarray) -> float:
    """The percentage of right answers; `table` is the confusion matrix [true class, answered class]."""
    return 100 * float(np.trace(table)) / float(table.sum())


def f1(table: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1."""
    both = 2 * table[1, 1]
    whole = both + table[0, 1] + table[1, 0]
    return 100 * float(both) / float(whole) if whole else 0.0


def matthews(table: np.ndarray) -> float:
    """The correlation of true and answered classes; 0 for a constant answer."""
    table = table.astype(float)
    true, answered, whole = table.sum(1), table.sum(0), table.sum()
    spread = (whole**2 - (true**2).sum()) * (whole**2 - (answered**2).sum())
    return 100 * float(np.trace(table) * whole - true @ answered) / math.sqrt(spread) if spread > 0 else 0.0


OF_CLASSES: dict[str, Callable[[np.ndarray], float]] = {"accuracy": accuracy, "F1": f1, "Matthews": matthews}


CORRELATION = "Pearson and Spearman"
"""The mean of both, as in GLUE for STS-B."""


def confusion_matrix(answers: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """[true class, answered class] counts."""
    return np.bincount(labels * classes + answers, minlength=classes**2).reshape(classes, classes)


def all_metrics(answers: np.ndarray, labels: np.ndarray, classes: int | None) -> dict[str, float]:
    """All metrics of answers: of classes, or of numbers where `classes` is None."""
    if classes is None:
        metrics = {"Pearson": 100 * pearson(answers, labels), "Spearman": 100 * spearman(answers, labels)}
        return {**metrics, CORRELATION: sum(metrics.values()) / 2}
    table = confusion_matrix(answers, labels, classes)
    return {name: metric(table) for name, metric in OF_CLASSES.items() if name != "F1" or classes == 2}


def constant_answer(metric: str, labels: np.ndarray, classes: int | None) -> float:
    """The score of the constant answer that is best for this metric: for accuracy the majority class."""
    if classes is None:
        return 0.0
    guesses = [np.full_like(labels, answer) for answer in range(classes)]
    return max(all_metrics(guess, labels, classes)[metric] for guess in guesses)


def standard_error(metric: str, answers: np.ndarray, labels: np.ndarray, classes: int | None) -> float | None:
    """Over samples of items; None for a single item."""
    if len(labels) < 2:
        return None
    if classes is None:
        rate = all_metrics(answers, labels, None)[metric] / 100
        return 100 * (1 - rate**2) / math.sqrt(len(labels) - 1)
    table = confusion_matrix(answers, labels, classes)
    if metric == "accuracy":
        rate = accuracy(table) / 100
        return 100 * math.sqrt(rate * (1 - rate) / len(labels))
    samples = np.random.default_rng(0).multinomial(len(labels), (table / table.sum()).ravel(), RESAMPLES)
    return float(np.std([OF_CLASSES[metric](each.reshape(table.shape)) for each in samples], ddof=1))
