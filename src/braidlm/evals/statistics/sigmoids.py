"""When a word was learned: where a sigmoid fitted to its curve crosses a threshold (Chang and Bergen, 2022).

The fits are the BabyLM pipeline's, down to the starting values, so that the ages are the same; a model's curves are
fitted by `least_squares.py`, which gives the same bits in every process. Two of the pipeline's choices are unexpected,
and are kept because its scores depend on them: the threshold for models is half way between the chance of one in
300,000 **in bits** and the smallest surprisal **in nats**, and that smallest surprisal is of a single context.
"""

import warnings
from typing import Any

import numpy as np

from braidlm.evals.statistics.from_scipy import check_scipy
from braidlm.evals.statistics.least_squares import least_squares

CHILD_THRESHOLD = 0.5
"""A word's age is where half of the children say it."""
VOCABULARY = 300_000
MAX_CALLS = 1000


def sigmoid(x: np.ndarray, height: float, steepness: float, midpoint: float, floor: float) -> np.ndarray:
    """A curve from `floor` to `floor + height`."""
    return height / (1 + np.exp(-steepness * (x - midpoint))) + floor


def child_age(ages: np.ndarray, shares: np.ndarray) -> float | None:
    """The month in which half of the children know a word; None where the curve has no such month within these ages."""
    known = ~np.isnan(shares)
    ages, shares = ages[known], shares[known]
    if len(shares) < 3:
        return None
    start = [1.0, 0.1, float(ages.mean()), 0.0]
    bounds = ([0, 0, ages[0], -0.5], [2.0, 1.0, ages[-1], 0.5])
    curve = _fit(ages, shares, p0=start, bounds=bounds)
    age = None if curve is None else _crossing(curve, CHILD_THRESHOLD)
    return age if age is not None and ages[0] <= age <= ages[-1] else None


def model_age(words: np.ndarray, surprisals: np.ndarray) -> float | None:
    """The logarithm (base 10) of the words of training after which a model has learned a word; None as above.

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
    with np.errstate(all="ignore"):  # the slopes of a step overflow
        curve = least_squares(lambda parameters: sigmoid(amounts, *parameters) - rising, start, MAX_CALLS)
    age = None if curve is None else _crossing(curve, -threshold)
    return age if age is not None and words[0] <= 10**age - 1 <= words[-1] else None


def _fit(x: np.ndarray, y: np.ndarray, **options: Any) -> np.ndarray | None:
    """The four parameters of a sigmoid; None where the fit fails."""
    check_scipy()
    from scipy.optimize import curve_fit

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # about curves that are flat or steps
        try:
            return curve_fit(sigmoid, x, y, maxfev=MAX_CALLS, **options)[0]
        except (RuntimeError, ValueError, TypeError):  # no convergence, or fewer points than parameters
            return None


def _crossing(curve: np.ndarray, value: float) -> float | None:
    height, steepness, midpoint, floor = (float(parameter) for parameter in curve)
    if not np.isfinite(curve).all() or steepness <= 0 or height <= 0 or not floor < value < height + floor:
        return None
    with np.errstate(all="ignore"):
        age = midpoint - np.log(height / (value - floor) - 1) / steepness
    return float(age) if np.isfinite(age) else None
