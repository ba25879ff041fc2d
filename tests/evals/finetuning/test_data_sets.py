"""Measures of answers against their definitions, written out item by item; constant answers; standard errors."""

import math

import numpy as np
import pytest

from braidlm.evals.finetuning.data_sets import CORRELATION, all_metrics, constant_answer, standard_error

DICE = np.random.default_rng(0)
LABELS = DICE.integers(0, 2, 60)
ANSWERS = np.where(DICE.random(60) < 0.7, LABELS, 1 - LABELS)


def pairs(answer: int, label: int) -> int:
    return sum(int(a == answer and t == label) for a, t in zip(ANSWERS, LABELS, strict=True))


def test_of_two_classes() -> None:
    hits, false, missed, rest = pairs(1, 1), pairs(1, 0), pairs(0, 1), pairs(0, 0)
    precision, recall = hits / (hits + false), hits / (hits + missed)
    below = math.sqrt((hits + false) * (hits + missed) * (rest + false) * (rest + missed))
    expected = {
        "accuracy": 100 * (hits + rest) / 60,
        "F1": 100 * 2 * precision * recall / (precision + recall),
        "Matthews": 100 * (hits * rest - false * missed) / below,
    }
    assert all_metrics(ANSWERS, LABELS, 2) == pytest.approx(expected)


def test_of_three_classes_there_is_no_f1() -> None:
    answers, labels = np.array([0, 1, 2, 2, 1]), np.array([0, 1, 2, 1, 0])
    found = all_metrics(answers, labels, 3)
    assert set(found) == {"accuracy", "Matthews"}
    assert found["accuracy"] == pytest.approx(60)


def test_the_usual_libraries_agree() -> None:
    metrics, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    found = all_metrics(ANSWERS, LABELS, 2)
    assert found["F1"] == pytest.approx(100 * metrics.f1_score(LABELS, ANSWERS))
    assert found["Matthews"] == pytest.approx(100 * metrics.matthews_corrcoef(LABELS, ANSWERS))
    three = DICE.integers(0, 3, 60), DICE.integers(0, 3, 60)
    assert all_metrics(*three, 3)["Matthews"] == pytest.approx(100 * metrics.matthews_corrcoef(three[1], three[0]))
    numbers, ties = DICE.normal(size=60), DICE.integers(0, 6, 60).astype(float)
    found = all_metrics(numbers, ties, None)
    assert found["Pearson"] == pytest.approx(100 * stats.pearsonr(numbers, ties)[0])
    assert found["Spearman"] == pytest.approx(100 * stats.spearmanr(numbers, ties)[0])
    assert found[CORRELATION] == pytest.approx((found["Pearson"] + found["Spearman"]) / 2)


def test_ranks_know_ties_and_forget_sizes() -> None:
    found = all_metrics(np.array([1.0, 2.0, 2.0, 100.0]), np.array([0.0, 1.0, 1.0, 2.0]), None)
    assert found["Spearman"] == pytest.approx(100)
    assert found["Pearson"] < 95


def test_answers_that_never_vary_correlate_with_nothing() -> None:
    assert set(all_metrics(np.ones(4), np.arange(4.0), None).values()) == {0.0}
    assert all_metrics(np.zeros(4, int), np.array([0, 1, 0, 1]), 2)["Matthews"] == 0.0


def test_a_constant_answer_is_the_majority_class() -> None:
    labels = np.array([0] * 7 + [1] * 3)
    assert constant_answer("accuracy", labels, 2) == pytest.approx(70)
    assert constant_answer("accuracy", np.array([2, 2, 0, 1]), 3) == pytest.approx(50)
    assert constant_answer("Matthews", labels, 2) == 0.0
    # Class 0 has no F1: always answering class 1 finds all three and is right three times of ten.
    assert constant_answer("F1", labels, 2) == pytest.approx(100 * 2 * 0.3 / 1.3)
    assert constant_answer(CORRELATION, np.arange(4.0), None) == 0.0


@pytest.mark.parametrize("metric", ["accuracy", "F1", "Matthews"])
def test_standard_errors_are_those_of_other_samples(metric: str) -> None:
    drawn = [DICE.integers(0, 60, 60) for _ in range(2000)]
    spread = np.std([all_metrics(ANSWERS[some], LABELS[some], 2)[metric] for some in drawn])
    assert standard_error(metric, ANSWERS, LABELS, 2) == pytest.approx(spread, rel=0.15)


def test_the_standard_error_of_a_correlation() -> None:
    labels = DICE.normal(size=400)
    answers = labels + DICE.normal(size=400)
    drawn = [DICE.integers(0, 400, 400) for _ in range(500)]
    spread = np.std([all_metrics(answers[some], labels[some], None)[CORRELATION] for some in drawn])
    assert standard_error(CORRELATION, answers, labels, None) == pytest.approx(spread, rel=0.25)
    assert standard_error("accuracy", ANSWERS[:1], LABELS[:1], 2) is None
