"""Curves through points by the method of Levenberg and Marquardt, the same to the last bit in every process.

The BabyLM pipeline fits its curves with SciPy's `curve_fit`, whose MINPACK may differ in a last bit when it is called
again with the same numbers. Where the points say what the curve is, that does not show; where they do not (a word
learned in one jump: every steep curve fits), it decides where on a plain of equally good curves the search ends. So the
search is made here: the same steps from the same start (Moré, 1978: slopes by differences, parameters on the scale of
their slopes, a region of trust, the same tests for an end), with every sum rounded once (`math.fsum`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Residuals = Callable[[np.ndarray], np.ndarray]
EPSILON = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
ENOUGH = 1.49012e-8
"""A smaller relative change, of the sum of squares or of the parameters, ends the search; SciPy's number."""
FIRST_REGION = 100.0
"""How far the first step may go, in lengths of the start; SciPy's number."""
TRIES = 10
"""To find a damping with which a step ends at the edge of the region."""


def least_squares(residuals: Residuals, start: Sequence[float], most_calls: int) -> np.ndarray | None:
    """The parameters of the least sum of squares; None where the search does not come to an end in so many calls."""
    try:
        return _search(residuals, np.array(start, dtype=np.float64), most_calls)
    except (ValueError, ZeroDivisionError, OverflowError):  # residuals or slopes that are no numbers
        return None


def _search(residuals: Residuals, here: np.ndarray, most_calls: int) -> np.ndarray | None:
    left = residuals(here)
    size, calls, damping, region = _length(left), 1, 0.0, 0.0
    scale: list[float] = []
    while True:
        slopes = _slopes(residuals, here, left)
        calls += len(slopes)
        lengths = [_length(slope) for slope in slopes]
        first = not scale
        if first:
            scale = [each or 1.0 for each in lengths]
            far = _length(scale * here)
            region = FIRST_REGION * far or FIRST_REGION
        longest = sorted(range(len(slopes)), key=lambda index: -lengths[index])
        triangle = _reduced(np.stack([*(slopes[index] for index in longest), left]), longest)
        steepest = _steepest(triangle, lengths, size)
        if steepest == 0:
            return here
        scale = list(map(max, scale, lengths))
        taken = False
        while not taken:
            step, damping = _damped(triangle, scale, region, damping)
            far = _length(scale * step)
            region = min(region, far) if first else region
            there = here - step
            then = residuals(there)
            calls += 1
            new = _length(then)
            gained = 1 - (new / size) ** 2 if 0.1 * new < size else -1.0
            linear = (triangle.image(step) / size) ** 2
            damped = damping * (far / size) ** 2
            expected = linear + 2 * damped
            ratio = gained / expected if expected else 0.0
            if ratio <= 0.25:
                shrink = 0.5 if gained >= 0 else 0.5 * (linear + damped) / (linear + damped - 0.5 * gained)
                shrink = 0.1 if 0.1 * new >= size or shrink < 0.1 else shrink
                region, damping = shrink * min(region, far / 0.1), damping / shrink
            elif damping == 0 or ratio >= 0.75:
                region, damping = 2 * far, 0.5 * damping
            taken = ratio >= 1e-4
            if taken:
                here, left, size, first = there, then, new, False
            reach = _length(scale * here)
            if _ended(gained, expected, ratio, region, reach, ENOUGH):
                return here
            if calls >= most_calls or steepest <= EPSILON or _ended(gained, expected, ratio, region, reach, EPSILON):
                return None  # too long, or as good as numbers allow and not good enough


def _ended(gained: float, expected: float, ratio: float, region: float, reach: float, enough: float) -> bool:
    """Whether neither the sum of squares nor the parameters change by more."""
    return (abs(gained) <= enough and expected <= enough and ratio <= 2) or region <= enough * reach


def _slopes(residuals: Residuals, here: np.ndarray, left: np.ndarray) -> list[np.ndarray]:
    """How the residuals change with each parameter."""
    found = []
    for index, value in enumerate(here.tolist()):
        change = math.sqrt(EPSILON) * abs(value) or math.sqrt(EPSILON)
        there = here.copy()
        there[index] = value + change
        found.append((residuals(there) - left) / change)
    return found


@dataclass(frozen=True)
class _Triangle:
    """Linear equations for a step, turned into triangular ones."""

    columns: list[list[float]]
    """Of each parameter, in `order`: its part in the equations up to its own."""
    right: list[float]
    order: list[int]

    @property
    def regular(self) -> bool:
        return all(column[-1] for column in self.columns)

    def solved(self) -> np.ndarray:
        """The step; what the equations do not determine is 0."""
        known = next((at for at, column in enumerate(self.columns) if column[-1] == 0), len(self.columns))
        right = self.right[:known]
        step = np.zeros(len(self.order))
        for at in reversed(range(known)):
            value = right[at] / self.columns[at][at]
            step[self.order[at]] = value
            right = [each - part * value for each, part in zip(right, self.columns[at][:at], strict=False)]
        return step

    def image(self, step: np.ndarray) -> float:
        """The length of what a step changes, if everything were linear."""
        values = [float(step[index]) for index in self.order]
        rows = range(len(values))
        return _length([sum(self.columns[at][row] * values[at] for at in rows if at >= row) for row in rows])

    def curvature(self, scale: Sequence[float], step: np.ndarray) -> float:
        """By how much the length of a step shrinks with damping, as Moré's iteration needs it."""
        far = _length(scale * step)
        found: list[float] = []
        for at, index in enumerate(self.order):
            value = scale[index] * (scale[index] * float(step[index]) / far)
            before = math.fsum(map(float.__mul__, self.columns[at][:at], found))
            found.append((value - before) / self.columns[at][at])
        return _length(found)


def _reduced(rows: np.ndarray, order: list[int]) -> _Triangle:
    """By reflections (Householder); `rows` are the columns of the equations and, last, their right sides."""
    count, columns = len(order), []
    for at in range(count):
        mirror, others = rows[at, at:], rows[at + 1 :, at:]
        size = math.copysign(_length(mirror), mirror[0])
        columns.append([*rows[at, :at].tolist(), -size])
        if size:
            mirror = mirror / size
            mirror[0] += 1
            along = [math.fsum(products) / float(mirror[0]) for products in (others * mirror).tolist()]
            others -= np.multiply.outer(along, mirror)
    return _Triangle(columns, rows[-1, :count].tolist(), order)


def _steepest(triangle: _Triangle, lengths: Sequence[float], size: float) -> float:
    """The largest cosine between the residuals and a slope; 0 at a minimum."""
    found = 0.0
    for index, column in zip(triangle.order, triangle.columns, strict=True):
        if lengths[index] and size:
            along = math.fsum(part * (value / size) for part, value in zip(column, triangle.right, strict=False))
            found = max(found, abs(along / lengths[index]))
    return found


def _damped(triangle: _Triangle, scale: Sequence[float], region: float, damping: float) -> tuple[np.ndarray, float]:
    """The step to the least sum of squares that stays within the region, to a tenth, and the damping that does it."""
    step = triangle.solved()
    over = _length(scale * step) - region
    if over <= 0.1 * region:
        return step, 0.0
    least = over / region / triangle.curvature(scale, step) ** 2 if triangle.regular else 0.0
    pull = _length(
        [
            math.fsum(map(float.__mul__, column, triangle.right)) / scale[index]
            for index, column in zip(triangle.order, triangle.columns, strict=True)
        ]
    )
    most = pull / region or TINY / min(region, 0.1)
    damping = min(max(damping, least), most) or pull / _length(scale * step)
    for attempt in range(1, TRIES + 1):
        damping = damping or max(TINY, 0.001 * most)
        held = _held(triangle, scale, damping)
        step, before = held.solved(), over
        over = _length(scale * step) - region
        if abs(over) <= 0.1 * region or (least == 0 and over <= before < 0) or attempt == TRIES:
            break
        change = over / region / held.curvature(scale, step) ** 2
        least, most = (max(least, damping), most) if over > 0 else (least, min(most, damping))
        damping = max(least, damping + change)
    return step, damping


def _held(triangle: _Triangle, scale: Sequence[float], damping: float) -> _Triangle:
    """The same equations with one more for each parameter, which holds it back."""
    count = len(triangle.order)
    rows = np.zeros((count + 1, 2 * count))
    for at, column in enumerate([*triangle.columns, triangle.right]):
        rows[at, : len(column)] = column
    rows[range(count), range(count, 2 * count)] = [math.sqrt(damping) * scale[index] for index in triangle.order]
    return _reduced(rows, triangle.order)


def _length(values: Sequence[float] | np.ndarray) -> float:
    found = math.hypot(*(values.tolist() if isinstance(values, np.ndarray) else values))
    if not math.isfinite(found):
        raise ValueError("not a number")
    return found
