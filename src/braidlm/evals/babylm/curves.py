"""When a word was learned: where a sigmoid fitted to its curve crosses a threshold (Chang and Bergen, 2022).

The fits are the BabyLM pipeline's, down to the starting values, so that the ages are the same. Two of the pipeline's
choices are unexpected, and are kept because its scores depend on them: the threshold for models is half way between the
chance of one in 300,000 **in bits** and the smallest surprisal **in nats**, and that smallest surprisal is of a single
context.

Children's curves are fitted by SciPy's `curve_fit` with bounds, as in the pipeline. A model's are fitted there without
bounds, by MINPACK, whose result differs in the last bit between calls with the same numbers, depending on their address
in memory. Where the points determine the curve, that does not matter; where they do not (a word learned in one jump:
every steep curve fits), it decides at which of many equally good curves the search ends (SciPy 1.17).
`least_squares` is the same algorithm with the same constants (Moré, 1978: a Jacobian by finite differences, parameters
scaled by their columns of it, a trust region, the same termination tests), with every sum rounded once (`math.fsum`).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

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
    from scipy.optimize import curve_fit  # `read_acquisition` has checked that it is here

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # about curves that are flat or steps
        try:
            curve = curve_fit(sigmoid, ages, shares, p0=start, bounds=bounds, maxfev=MAX_CALLS)[0]
        except (RuntimeError, ValueError, TypeError):  # no convergence, or fewer points than parameters
            return None
    age = _crossing(curve, CHILD_THRESHOLD)
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


def _crossing(curve: np.ndarray, value: float) -> float | None:
    height, steepness, midpoint, floor = (float(parameter) for parameter in curve)
    if not np.isfinite(curve).all() or steepness <= 0 or height <= 0 or not floor < value < height + floor:
        return None
    with np.errstate(all="ignore"):
        age = midpoint - np.log(height / (value - floor) - 1) / steepness
    return float(age) if np.isfinite(age) else None


Residuals = Callable[[np.ndarray], np.ndarray]
EPSILON = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
TOLERANCE = 1.49012e-8
"""A smaller relative change, of the sum of squares or of the parameters, ends the search; SciPy's value."""
FIRST_RADIUS = 100.0
"""The first trust radius, as a multiple of the scaled norm of the start; SciPy's value."""
MAX_DAMPING_STEPS = 10
"""Iterations to find a damping with which a step ends at the edge of the trust region."""


def least_squares(residuals: Residuals, start: Sequence[float], max_calls: int) -> np.ndarray | None:
    """The parameters of the least sum of squares; None where the search does not converge in `max_calls`."""
    try:
        return _search(residuals, np.array(start, dtype=np.float64), max_calls)
    except (ValueError, ZeroDivisionError, OverflowError):  # residuals or a Jacobian that are not finite
        return None


def _search(residuals: Residuals, point: np.ndarray, max_calls: int) -> np.ndarray | None:
    current = residuals(point)
    size, calls, damping, radius = _norm(current), 1, 0.0, 0.0
    scale: list[float] = []
    while True:
        jacobian: list[np.ndarray] = []  # the derivative of the residuals with respect to each parameter
        for index, value in enumerate(point.tolist()):
            change = math.sqrt(EPSILON) * abs(value) or math.sqrt(EPSILON)
            candidate = point.copy()
            candidate[index] = value + change
            jacobian.append((residuals(candidate) - current) / change)
        calls += len(jacobian)
        norms = [_norm(column) for column in jacobian]
        first = not scale
        if first:
            scale = [each or 1.0 for each in norms]
            distance = _norm(scale * point)
            radius = FIRST_RADIUS * distance or FIRST_RADIUS
        order = sorted(range(len(jacobian)), key=lambda index: -norms[index])
        triangular = _triangularize(np.stack([*(jacobian[index] for index in order), current]), order)
        gradient_norm = 0.0  # the largest cosine between the residuals and a column of the Jacobian
        for index, column in zip(order, triangular.columns, strict=True):
            if norms[index] and size:
                product = math.fsum(part * (own / size) for part, own in zip(column, triangular.right, strict=False))
                gradient_norm = max(gradient_norm, abs(product / norms[index]))
        if gradient_norm == 0:
            return point
        scale = list(map(max, scale, norms))
        accepted = False
        while not accepted:
            step, damping = _damped_step(triangular, scale, radius, damping)
            distance = _norm(scale * step)
            radius = min(radius, distance) if first else radius
            candidate = point - step
            candidate_residuals = residuals(candidate)
            calls += 1
            new = _norm(candidate_residuals)
            reduction = 1 - (new / size) ** 2 if 0.1 * new < size else -1.0
            linear = (triangular.image(step) / size) ** 2
            damped = damping * (distance / size) ** 2
            expected = linear + 2 * damped
            ratio = reduction / expected if expected else 0.0
            if ratio <= 0.25:
                shrink = 0.5 if reduction >= 0 else 0.5 * (linear + damped) / (linear + damped - 0.5 * reduction)
                shrink = 0.1 if 0.1 * new >= size or shrink < 0.1 else shrink
                radius, damping = shrink * min(radius, distance / 0.1), damping / shrink
            elif damping == 0 or ratio >= 0.75:
                radius, damping = 2 * distance, 0.5 * damping
            accepted = ratio >= 1e-4
            if accepted:
                point, current, size, first = candidate, candidate_residuals, new, False
            norm = _norm(scale * point)
            if _converged(reduction, expected, ratio, radius, norm, TOLERANCE):
                return point
            stalled = gradient_norm <= EPSILON or _converged(reduction, expected, ratio, radius, norm, EPSILON)
            if calls >= max_calls or stalled:
                return None  # too many calls, or no further reduction is possible in float64


def _converged(reduction: float, expected: float, ratio: float, radius: float, norm: float, tolerance: float) -> bool:
    """Whether neither the sum of squares nor the parameters change by more."""
    return (abs(reduction) <= tolerance and expected <= tolerance and ratio <= 2) or radius <= tolerance * norm


@dataclass(frozen=True)
class _Triangular:
    """The triangular system of a QR decomposition with column pivoting."""

    columns: list[list[float]]
    """The entries of each column of R down to the diagonal, in `order`."""
    right: list[float]
    order: list[int]

    def solve(self) -> np.ndarray:
        """The step, in which parameters that the system does not determine stay as they are."""
        known = next((at for at, column in enumerate(self.columns) if column[-1] == 0), len(self.columns))
        right = self.right[:known]
        step = np.zeros(len(self.order))
        for at in reversed(range(known)):
            value = right[at] / self.columns[at][at]
            step[self.order[at]] = value
            right = [each - part * value for each, part in zip(right, self.columns[at][:at], strict=False)]
        return step

    def image(self, step: np.ndarray) -> float:
        """The norm of the change of the residuals by a step in the linear model."""
        values = [float(step[index]) for index in self.order]
        rows = range(len(values))
        return _norm([sum(self.columns[at][row] * values[at] for at in rows if at >= row) for row in rows])

    def curvature(self, scale: Sequence[float], step: np.ndarray) -> float:
        """How fast the norm of a step shrinks with damping, as Moré's iteration needs it."""
        distance = _norm(scale * step)
        solution: list[float] = []
        for at, index in enumerate(self.order):
            value = scale[index] * (scale[index] * float(step[index]) / distance)
            before = math.fsum(map(float.__mul__, self.columns[at][:at], solution))
            solution.append((value - before) / self.columns[at][at])
        return _norm(solution)


def _triangularize(rows: np.ndarray, order: list[int]) -> _Triangular:
    """The system by Householder reflections; `rows` are the columns of the Jacobian and, last, the residuals."""
    count, columns = len(order), []
    for at in range(count):
        reflector, others = rows[at, at:], rows[at + 1 :, at:]
        size = math.copysign(_norm(reflector), reflector[0])
        columns.append([*rows[at, :at].tolist(), -size])
        if size:
            reflector = reflector / size
            reflector[0] += 1
            projections = [math.fsum(products) / float(reflector[0]) for products in (others * reflector).tolist()]
            others -= np.multiply.outer(projections, reflector)
    return _Triangular(columns, rows[-1, :count].tolist(), order)


def _damped_step(
    triangular: _Triangular, scale: Sequence[float], radius: float, damping: float
) -> tuple[np.ndarray, float]:
    """The step to the least sum of squares within the radius, to a tenth, and its damping."""
    step = triangular.solve()
    excess = _norm(scale * step) - radius
    if excess <= 0.1 * radius:
        return step, 0.0
    full_rank = all(column[-1] for column in triangular.columns)
    lower = excess / radius / triangular.curvature(scale, step) ** 2 if full_rank else 0.0
    products = [math.fsum(map(float.__mul__, column, triangular.right)) for column in triangular.columns]
    gradient = _norm([product / scale[index] for index, product in zip(triangular.order, products, strict=True)])
    upper = gradient / radius or TINY / min(radius, 0.1)
    damping = min(max(damping, lower), upper) or gradient / _norm(scale * step)
    for attempt in range(1, MAX_DAMPING_STEPS + 1):
        damping = damping or max(TINY, 0.001 * upper)
        damped_system = _with_damping(triangular, scale, damping)
        step, before = damped_system.solve(), excess
        excess = _norm(scale * step) - radius
        if abs(excess) <= 0.1 * radius or (lower == 0 and excess <= before < 0) or attempt == MAX_DAMPING_STEPS:
            break
        change = excess / radius / damped_system.curvature(scale, step) ** 2
        lower, upper = (max(lower, damping), upper) if excess > 0 else (lower, min(upper, damping))
        damping = max(lower, damping + change)
    return step, damping


def _with_damping(triangular: _Triangular, scale: Sequence[float], damping: float) -> _Triangular:
    """The system with one more row for each parameter, which damps it."""
    count = len(triangular.order)
    rows = np.zeros((count + 1, 2 * count))
    for at, column in enumerate([*triangular.columns, triangular.right]):
        rows[at, : len(column)] = column
    rows[range(count), range(count, 2 * count)] = [math.sqrt(damping) * scale[index] for index in triangular.order]
    return _triangularize(rows, triangular.order)


def _norm(values: Sequence[float] | np.ndarray) -> float:
    norm = math.hypot(*(values.tolist() if isinstance(values, np.ndarray) else values))
    if not math.isfinite(norm):
        raise ValueError("not a number")
    return norm
