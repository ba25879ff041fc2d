"""When something was learned: the place where a sigmoid fitted to it crosses a threshold (Chang and Bergen, 2022).

The BabyLM pipeline's ways of fitting, to the starting values, so that the ages are the same; a model's curves are
fitted by `least_squares.py`, so that they are the same in every process, too. Two of its choices are not
what one would expect, and are kept because its scores depend on them: the threshold for models is half way between the
chance of one in 300,000 **in bits** and the smallest surprisal **in nats**, and that smallest one is of a single
context.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.evals.statistics.least_squares import least_squares

CHILD_KNOWS = 0.5
"""A word's age is where half of the children say it."""
VOCABULARY = 300_000
TRIES = 1000


def sigmoid(x: np.ndarray, height: float, steepness: float, middle: float, floor: float) -> np.ndarray:
    """A curve from `floor` to `floor + height`."""
    return height / (1 + np.exp(-steepness * (x - middle))) + floor


def child_age(ages: np.ndarray, shares: np.ndarray) -> float | None:
    """The month in which half of the children know a word; None where the curve does not say, or not in these ages."""
    known = ~np.isnan(shares)
    ages, shares = ages[known], shares[known]
    if len(shares) < 3:
        return None
    start = [1.0, 0.1, float(ages.mean()), 0.0]
    bounds = ([0, 0, ages[0], -0.5], [2.0, 1.0, ages[-1], 0.5])
    curve = _fitted(ages, shares, p0=start, bounds=bounds)
    age = None if curve is None else _crossing(curve, CHILD_KNOWS)
    return age if age is not None and ages[0] <= age <= ages[-1] else None


def model_age(words: np.ndarray, surprisals: np.ndarray) -> float | None:
    """The logarithm (of base 10) of the words of training after which a model has learned a word; None as above.

    `words` rise; there are as many values for each amount as there are contexts of the word.
    """
    known = ~np.isnan(surprisals)
    words, surprisals = words[known], surprisals[known]
    if len(surprisals) < 3:
        return None
    chance = np.log2(VOCABULARY)
    threshold = chance - 0.5 * (chance - surprisals.min())
    rising, amounts = -surprisals, np.log10(words + 1)
    start = [float(np.ptp(rising)), 1.0, float(amounts.mean()), float(rising.min())]
    with np.errstate(all="ignore"):  # of steps, whose slopes are too large for numbers
        curve = least_squares(lambda numbers: sigmoid(amounts, *numbers) - rising, start, TRIES)
    age = None if curve is None else _crossing(curve, -threshold)
    return age if age is not None and words[0] <= 10**age - 1 <= words[-1] else None


def _fitted(x: np.ndarray, y: np.ndarray, **options: Any) -> np.ndarray | None:
    """The four numbers of a sigmoid; None where none is found."""
    fit = _curve_fit()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of curves that are flat or steps
        try:
            return fit(sigmoid, x, y, maxfev=TRIES, **options)[0]
        except (RuntimeError, ValueError, TypeError):  # no fit within the tries, or fewer points than numbers
            return None


def _crossing(curve: np.ndarray, value: float) -> float | None:
    height, steepness, middle, floor = (float(number) for number in curve)
    if not np.isfinite(curve).all() or steepness <= 0 or height <= 0 or not floor < value < height + floor:
        return None
    with np.errstate(all="ignore"):
        age = middle - np.log(height / (value - floor) - 1) / steepness
    return float(age) if np.isfinite(age) else None


def check_fitting() -> None:
    """Say at once if curves cannot be fitted."""
    _curve_fit()


def _curve_fit() -> Callable[..., Any]:
    try:
        from scipy.optimize import curve_fit
    except ImportError:
        raise BraidError("fitting curves needs scipy", todo="`pip install braidlm[eval]` gets it.") from None
    return curve_fit
