"""The measures: bounds and invariances for any counts, and examples worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from braidlm.inspection.measures import (
    accuracy,
    accuracy_by_chance,
    entropy,
    information_by_chance,
    mutual_information,
    p_value,
    shares,
)

counts = arrays(np.int64, array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.integers(0, 50))


@given(counts)
def test_shares_are_parts_of_one(joint: np.ndarray) -> None:
    for row, part in zip(joint, shares(joint), strict=True):
        assert ((part >= 0) & (part <= 1)).all()
        assert part.sum() == pytest.approx(1.0 if row.sum() else 0.0)


@given(counts)
def test_information_lies_between_nothing_and_all_there_is(joint: np.ndarray) -> None:
    information = mutual_information(joint)
    assert 0.0 <= information <= min(entropy(joint.sum(0)), entropy(joint.sum(1))) + 1e-9
    assert information == pytest.approx(mutual_information(joint.T))


@given(counts, st.randoms(use_true_random=False))
def test_names_and_order_do_not_matter(joint: np.ndarray, random) -> None:
    rows, columns = list(range(joint.shape[0])), list(range(joint.shape[1]))
    random.shuffle(rows)
    random.shuffle(columns)
    mixed = joint[rows][:, columns]
    assert mutual_information(mixed) == pytest.approx(mutual_information(joint), abs=1e-9)
    assert entropy(mixed.sum(0)) == pytest.approx(entropy(joint.sum(0)), abs=1e-9)
    right = [row % joint.shape[1] for row in range(joint.shape[0])]
    moved = [columns.index(right[row]) for row in rows]
    for measure in (accuracy, accuracy_by_chance):
        assert measure(mixed, moved) == pytest.approx(measure(joint, right))


@given(
    arrays(np.int64, st.integers(1, 5), elements=st.integers(1, 20)),
    arrays(np.int64, st.integers(1, 5), elements=st.integers(1, 20)),
)
def test_independent_choices_tell_nothing(domains: np.ndarray, choices: np.ndarray) -> None:
    joint = np.outer(domains, choices)
    assert mutual_information(joint) == pytest.approx(0.0, abs=1e-9)
    right = [0] * len(domains)
    assert accuracy(joint, right) == pytest.approx(accuracy_by_chance(joint, right))


@given(arrays(np.int64, st.integers(1, 6), elements=st.integers(1, 20)))
def test_a_path_for_each_domain_tells_all(domains: np.ndarray) -> None:
    joint = np.diag(domains)
    assert mutual_information(joint) == pytest.approx(entropy(domains), abs=1e-9)
    assert accuracy(joint, list(range(len(domains)))) == 1.0


def test_by_hand() -> None:
    assert entropy(np.array([1, 1])) == 1.0
    assert entropy(np.array([7, 0])) == 0.0
    assert entropy(np.array([2, 1, 1])) == 1.5
    assert mutual_information(np.array([[5, 0], [0, 5]])) == pytest.approx(1.0)
    # 3 of 4 right on either side: 1 - H(1/4) bits.
    assert mutual_information(np.array([[3, 1], [1, 3]])) == pytest.approx(1 - 0.811278, abs=1e-6)
    skewed = np.array([[8, 0, 2], [6, 2, 2]])
    assert accuracy(skewed, [0, 1]) == pytest.approx(10 / 20)
    assert accuracy_by_chance(skewed, [0, 1]) == pytest.approx(0.5 * 14 / 20 + 0.5 * 2 / 20)


def test_domains_without_a_path_are_not_judged() -> None:
    joint = np.array([[4, 0], [1, 3], [9, 9]])
    assert accuracy(joint, [0, 1, None]) == pytest.approx(7 / 8)
    assert accuracy(joint, [None, None, None]) is None
    assert accuracy_by_chance(joint, [None, None, None]) is None


def test_chance_permutes_whole_texts() -> None:
    """Two texts whose tokens all choose alike: every permutation gives all the information, however many tokens."""
    two = np.array([[1000, 0], [0, 1000]])
    assert information_by_chance(two, [0, 1]) == pytest.approx(1.0)
    assert p_value(1.0, information_by_chance(two, [0, 1])) == 1.0


def test_chance_is_low_with_many_texts_and_high_with_few() -> None:
    few, many = (np.eye(2, dtype=int)[np.arange(size) % 2] for size in (8, 400))
    domains = [n // 2 % 2 for n in range(400)]
    assert information_by_chance(few, domains[:8]).mean() > 0.1 > information_by_chance(many, domains).mean() * 10
    assert (information_by_chance(many, domains) == information_by_chance(many, domains)).all()


def test_p_value_of_what_chance_never_gives() -> None:
    alike = np.eye(2, dtype=int)[np.arange(40) % 2]
    domains = [n % 2 for n in range(40)]
    assert p_value(1.0, information_by_chance(alike, domains)) == pytest.approx(1 / 500)
