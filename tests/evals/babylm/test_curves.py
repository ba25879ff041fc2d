"""Ages from fitted curves: where they have none, and that a search ends where SciPy's does, wherever numbers lie."""

import random

import numpy as np
import pytest

from braidlm.evals.babylm.acquisition import AGES
from braidlm.evals.babylm.curves import child_age, least_squares, model_age, sigmoid

pytest.importorskip("scipy", reason="the eval extra is not installed")


def test_ages_that_curves_do_not_say() -> None:
    ages = np.array(AGES, dtype=np.float64)
    assert child_age(ages, sigmoid(ages, 1.0, 0.5, 22.0, 0.0)) == pytest.approx(22.0, abs=1e-3)
    assert child_age(ages, np.full(15, 0.1)) is None, "too few children ever know it"
    assert child_age(ages, np.full(15, np.nan)) is None
    amounts = np.repeat([1e6, 1e7, 1e8], 2)
    assert model_age(amounts, np.full(6, 4.0)) is None, "nothing is learned"
    assert model_age(amounts, np.array([2.0, 2.0, 5.0, 5.0, 9.0, 9.0])) is None, "it is forgotten"
    assert model_age(amounts[:2], np.array([9.0, 8.0])) is None


def placed(values: np.ndarray, offset: int) -> np.ndarray:
    """The same numbers, so many bytes behind a multiple of 64 in memory."""
    room = np.empty(values.nbytes + 128, dtype=np.uint8)
    begin = -room.ctypes.data % 64 + offset
    found = room[begin : begin + values.nbytes].view(np.float64)
    found[:] = values
    return found


def jumps(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A word that was learned between the first two of six checkpoints: every steep curve fits."""
    rng = np.random.default_rng(seed)
    means = np.array([18.0, 16.2, 16.4, 15.9, 16.3, 16.1]) + rng.normal(0, 0.1, 6)
    amounts = np.repeat(np.arange(1, 7) * 1e6, 20)
    return amounts, (means[:, None] + rng.normal(0, 0.5, (6, 20))).reshape(-1)


def test_ages_do_not_depend_on_where_numbers_lie() -> None:
    """Of curves that the points hardly determine, where SciPy's own search ends differently from call to call."""
    found, litter = set(), []
    rng = random.Random(0)
    for offset in range(0, 64, 8):
        litter.append([np.empty(rng.randrange(1, 5000), dtype=np.uint8) for _ in range(50)])
        ages = []
        for seed in range(6):
            amounts, surprisals = jumps(seed)
            ages.append(model_age(placed(amounts, offset), placed(surprisals, 56 - offset)))
        children = sigmoid(np.array(AGES, dtype=np.float64), 0.9, 0.3, 21.0, 0.05)
        ages.append(child_age(placed(np.array(AGES, dtype=np.float64), offset), placed(children, 56 - offset)))
        found.add(tuple(ages))
    assert len(found) == 1
    assert sum(age is not None for age in found.pop()) >= 3


@pytest.mark.parametrize("seed", range(8))
def test_a_search_ends_where_scipys_does(seed: int) -> None:
    from scipy.optimize import curve_fit

    rng = np.random.default_rng(seed)
    x = np.repeat(np.sort(rng.uniform(6, 8, 8)), 20)
    real = (rng.uniform(4, 12), rng.uniform(2, 8), rng.uniform(6.5, 7.5), rng.uniform(-22, -14))
    y = sigmoid(x, *real) + rng.normal(0, 0.8, len(x))
    start = [float(np.ptp(y)), 1.0, float(x.mean()), float(y.min())]
    expected = curve_fit(sigmoid, x, y, p0=start, maxfev=1000)[0]
    found = least_squares(lambda numbers: sigmoid(x, *numbers) - y, start, 1000)
    assert found is not None
    squares = [float(np.square(sigmoid(x, *numbers) - y).sum()) for numbers in (found, expected)]
    assert squares[0] == pytest.approx(squares[1], rel=1e-7)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_searches_that_do_not_end() -> None:
    x = np.linspace(0, 1, 10)
    assert least_squares(lambda numbers: numbers[0] * x - 3 * x, [1.0], 100) == pytest.approx([3.0])
    assert least_squares(lambda numbers: np.zeros(10) * numbers[0], [1.0], 100) == pytest.approx([1.0])
    assert least_squares(lambda numbers: np.exp(numbers[0] * x) + x, [1.0], 3) is None, "too few calls"
    assert least_squares(lambda numbers: numbers[0] * x + np.nan, [1.0], 100) is None
