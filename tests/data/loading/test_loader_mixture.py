import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from braidlm.core.errors import BraidError
from braidlm.data.loading.config import CurriculumPoint, MixtureConfig
from braidlm.data.loading.loader import Mixture, assign_rows
from braidlm.model.config.strict import decode, encode

TOKENS = {"maths": 100, "stories": 300}


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=9), st.integers(1, 17))
@example([4, 3, 19, 1, 19, 14, 19, 4], 6)  # giving each row to the largest credit fails here
def test_after_any_number_of_rows_each_set_has_its_share_within_one(weights: list[float], batch: int) -> None:
    shares = (np.array(weights) / np.sum(weights)).tolist()
    credits, chosen = [0.0] * len(shares), []
    for _ in range(20):
        rows, credits = assign_rows(batch, shares, credits)
        chosen += rows.tolist()
    had = np.cumsum(np.eye(len(shares))[chosen], axis=0)
    due = np.arange(1, len(chosen) + 1)[:, None] * np.array(shares)
    assert np.abs(had - due).max() < 1.0


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_rows_do_not_depend_on_how_they_are_batched(weights: list[int], batches: list[int]) -> None:
    shares = [w / sum(weights) for w in weights]
    whole, _ = assign_rows(sum(batches), shares, [0.0] * len(shares))
    credits, pieces = [0.0] * len(shares), []
    for rows in batches:
        piece, credits = assign_rows(rows, shares, credits)
        pieces += piece.tolist()
    assert pieces == whole.tolist()


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any), min_size=1, max_size=30))
def test_a_set_without_weight_gets_no_row_and_credits_stay_small(history: list[list[int]]) -> None:
    credits = [0.0] * 3
    for weights in history:
        shares = [w / sum(weights) for w in weights]
        rows, credits = assign_rows(7, shares, credits)
        assert all(weights[i] > 0 for i in rows)
        assert max(map(abs, credits)) < 2.0
        assert abs(sum(credits)) < 1e-9


def test_two_equal_sets_alternate() -> None:
    rows, _ = assign_rows(6, [0.5, 0.5], [0.0, 0.0])
    assert rows.tolist() == [0, 1, 0, 1, 0, 1]


def test_without_weights_shares_follow_the_tokens() -> None:
    assert Mixture(None, TOKENS).shares(0.3) == [0.25, 0.75]
    assert Mixture(MixtureConfig(weights={"stories": 3, "maths": 2}), TOKENS).shares(1.0) == [0.4, 0.6]


@pytest.mark.parametrize(
    ("progress", "maths"), [(0.0, 0.0), (0.2, 0.0), (0.35, 0.25), (0.5, 0.5), (0.75, 0.75), (1.0, 1.0), (7.0, 1.0)]
)
def test_a_curriculum_draws_straight_lines_between_its_points(progress: float, maths: float) -> None:
    points = [
        {"at": 0.2, "weights": {"stories": 1}},
        {"at": 0.5, "weights": {"stories": 40, "maths": 40}},  # the unit has no effect
        {"at": 1.0, "weights": {"maths": 2}},
    ]
    config = decode(MixtureConfig, {"curriculum": points}, "mix")
    assert Mixture(config, TOKENS).shares(progress) == pytest.approx([maths, 1 - maths])


def test_configurations_decode_strictly_and_come_back() -> None:
    config = decode(MixtureConfig, {"curriculum": [{"at": 0, "weights": {"stories": 1, "maths": 2}}]})
    assert config.curriculum == [CurriculumPoint(0.0, {"stories": 1.0, "maths": 2.0})]
    assert decode(MixtureConfig, encode(config)) == config
    assert decode(MixtureConfig, {"weights": {"stories": 1}}).weights == {"stories": 1.0}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"weights": {"a": -1}}, "mix.weights.a: expected a number from 0 to 1e9, got -1"),
        ({"weights": {"a": 0}}, "mix: at least one weight must be above zero"),
        ({"weights": {"a": float("nan")}}, "mix.weights.a: expected a number from 0 to 1e9, got nan"),
        ({"weight": {"a": 1}}, "mix: unknown key 'weight'. Did you mean 'weights'?"),
        ({"curriculum": [{"at": 2, "weights": {"a": 1}}]}, "mix.curriculum[0].at: expected a number from 0 to 1"),
        ({"curriculum": [{"at": 0, "weights": {}}]}, "mix.curriculum[0]: at least one weight must be above zero"),
        (
            {"curriculum": [{"at": 0.5, "weights": {"a": 1}}, {"at": 0.1, "weights": {"a": 1}}]},
            "mix: curriculum: the points must rise, but 0.1 comes after 0.5",
        ),
        (
            {"weights": {"a": 1}, "curriculum": [{"at": 0, "weights": {"a": 1}}]},
            "mix: give either weights or a curriculum, not both",
        ),
    ],
)
def test_wrong_mixes_are_refused(data: dict, problem: str) -> None:
    with pytest.raises(BraidError) as caught:
        decode(MixtureConfig, data, "mix")
    assert problem in str(caught.value)


def test_names_that_fit_no_data_set_and_sets_without_weight_are_all_reported() -> None:
    with pytest.raises(BraidError) as caught:
        Mixture(MixtureConfig(weights={"storys": 1}), TOKENS)
    text = str(caught.value)
    assert "mix: a weight is given for 'storys', which is no data set. Did you mean 'stories'?" in text
    assert "data set 'maths' has no weight; give it one (0 to leave it out)" in text
    assert Mixture(MixtureConfig(weights={"stories": 1, "maths": 0}), TOKENS).shares(0) == [0.0, 1.0]
