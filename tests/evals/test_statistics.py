"""Bold or not: influences give the errors that tasks report, and differences count only beyond the noise."""

import math
import random
from typing import Any

import numpy as np
import pytest

from braidlm.evals.formats.options import set_accuracy
from braidlm.evals.results import ModelResults, TaskResult
from braidlm.evals.statistics import (
    INFLUENCE,
    compare_best,
    difference_error,
    mean_influences,
    ratio_error,
    ratio_influences,
    set_influences,
)


def root(influences: list[float]) -> float:
    """The standard error that influences stand for."""
    return math.sqrt(sum(value**2 for value in influences)) / len(influences)


def test_influences_of_sets_give_the_standard_error_of_the_score() -> None:
    rng = random.Random(0)
    sets = [rng.choice("abc") for _ in range(200)]
    right = [rng.random() < 0.7 for _ in sets]
    splits = {"a": "x", "b": "x", "c": "y"}
    result = set_accuracy("t", "accuracy", sets, right, [0.5] * len(sets), splits)
    assert result.standard_error == pytest.approx(root(result.items[INFLUENCE]), rel=1e-4)
    assert sum(result.items[INFLUENCE]) == pytest.approx(0, abs=0.01)


def test_influences_of_means_and_ratios_do_too() -> None:
    rng = np.random.default_rng(0)
    bits, lengths = rng.random(50) * 100, rng.integers(10, 90, 50)
    expected = ratio_error(bits, lengths, float(bits.sum() / lengths.sum()))
    assert root(ratio_influences(bits, lengths)) * math.sqrt(50 / 49) == pytest.approx(expected, rel=1e-3)
    hits = rng.random(80) < 0.3
    assert root(mean_influences(100.0 * hits)) == pytest.approx(100 * hits.std() / math.sqrt(80), rel=1e-4)


def test_influence_is_how_a_score_moves() -> None:
    """Against the definition: count one item a little more, and look how far the score goes."""
    sets, right = ["a", "a", "a", "b", "b"], [1.0, 0.0, 1.0, 1.0, 0.0]
    weights = {"a": 0.5, "b": 0.5}
    found = set_influences(right, sets, weights)

    def score(counts: list[float]) -> float:
        total = 0.0
        for name, weight in weights.items():
            mine = [at for at, of in enumerate(sets) if of == name]
            total += weight * sum(counts[at] * right[at] for at in mine) / sum(counts[at] for at in mine)
        return total

    for at in range(5):
        more = [1.0 + (1e-6 if at == other else 0.0) for other in range(5)]
        assert found[at] == pytest.approx((score(more) - score([1.0] * 5)) / 1e-6 * 5, abs=1e-4)


def test_a_paired_error_is_that_of_the_items_differences() -> None:
    first, second = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    apart = np.array(first) - np.array(second)
    found = difference_error(mean_influences(first), mean_influences(second))
    assert found == pytest.approx(apart.std(ddof=1) / math.sqrt(6), rel=1e-3)
    assert difference_error([0.0], [0.0]) is None
    assert difference_error([0.0, 1.0], [0.0, 1.0, 2.0]) is None


def result(score: float, error: float | None = 1.0, **more: Any) -> TaskResult:
    return TaskResult("t", "m", score, 100, error, **more)


def models(*results: TaskResult) -> list[ModelResults]:
    return [ModelResults(name, "", "", tasks={"t": one}) for name, one in zip("abc", results, strict=False)]


def test_two_standard_errors_in_quadrature() -> None:
    clear = compare_best(models(result(50.0), result(53.0), result(40.0)))["t"]
    assert (clear.best, clear.next, clear.paired, clear.clear) == ("b", "a", False, True)
    assert clear.standard_error == pytest.approx(math.sqrt(2))
    assert not compare_best(models(result(50.0), result(52.8)))["t"].clear, "2.8 is less than two times 1.41"


def test_items_in_common_make_small_differences_count() -> None:
    right = [rng < 60 for rng in range(100)]
    better = [rng < 66 for rng in range(100)]
    a = result(60.0, 4.9, items={INFLUENCE: mean_influences([100.0 * hit for hit in right])})
    b = result(66.0, 4.7, items={INFLUENCE: mean_influences([100.0 * hit for hit in better])})
    verdict = compare_best(models(a, b))["t"]
    assert (verdict.paired, verdict.clear, verdict.best) == (True, True, "b")
    assert verdict.standard_error == pytest.approx(100 * math.sqrt(0.06 * 0.94 / 99), rel=1e-3)
    assert not compare_best(models(result(60.0, 4.9), result(66.0, 4.7)))["t"].clear, (
        "without the items it would be noise"
    )


def test_less_can_be_better() -> None:
    low, high = result(1.0, 0.01, higher_is_better=False), result(1.2, 0.01, higher_is_better=False)
    verdict = compare_best(models(high, low))["t"]
    assert (verdict.best, verdict.clear) == ("b", True)
    assert verdict.difference == pytest.approx(0.2)


def test_what_is_unknown_proves_nothing() -> None:
    assert not compare_best(models(result(0.0, None), result(100.0, None)))["t"].clear
    one_item = {"items": {INFLUENCE: [0.0, 0.0]}}
    assert not compare_best(models(result(0.0, 0.0, **one_item), result(100.0, 0.0, **one_item)))["t"].clear
    assert compare_best(models(result(50.0), result(math.nan))) == {}
    assert compare_best(models(result(50.0))) == {}
