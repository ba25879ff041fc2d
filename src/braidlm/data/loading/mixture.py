"""Which data set each row of a batch comes from: weights, a curriculum, and a deterministic, even assignment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.model.config.ranges import NonNegative, Share


@dataclass
class CurriculumPoint:
    """The weights at one point of the training."""

    at: Share
    """Training progress, 0 at the beginning and 1 at the end."""
    weights: dict[str, NonNegative]
    """Weight per data set; one that is not named has none at this point."""

    def __post_init__(self) -> None:
        _check_weights(self.weights)


@dataclass
class MixtureConfig:
    """How several data sets share the rows."""

    weights: dict[str, NonNegative] | None = None
    """Share of the rows per data set, in any unit; without it, in proportion to the data sets' tokens."""
    curriculum: list[CurriculumPoint] = field(default_factory=list)
    """Instead of `weights`: the shares at points of the training, interpolated linearly."""

    def __post_init__(self) -> None:
        if self.weights is not None and self.curriculum:
            raise BraidError("give either weights or a curriculum, not both")
        if self.weights is not None:
            _check_weights(self.weights)
        for before, after in pairwise(self.curriculum):
            if after.at <= before.at:
                raise BraidError(f"curriculum: the points must rise, but {after.at:g} comes after {before.at:g}")


class Mixture:
    """The shares of named data sets at any point of the training."""

    def __init__(self, config: MixtureConfig | None, tokens: Mapping[str, int]):
        """`tokens`: how many each data set has; its order is the order of the shares."""
        config = config or MixtureConfig()
        points = config.curriculum or [CurriculumPoint(0.0, config.weights or {n: float(t) for n, t in tokens.items()})]
        _check_names(points, tokens)
        self._points = [point.at for point in points]
        table = np.array([[point.weights.get(name, 0.0) for name in tokens] for point in points])
        # Shares are interpolated, not weights, so the unit of a point's weights has no effect.
        self._shares = table / table.sum(axis=1, keepdims=True)

    def shares(self, progress: float) -> list[float]:
        """The share of each data set at `progress` in [0, 1]; they sum to 1."""
        return [float(np.interp(progress, self._points, column)) for column in self._shares.T]


def assign_rows(rows: int, shares: Sequence[float], credits: Sequence[float]) -> tuple[np.ndarray, list[float]]:
    """The data set of each of the next rows, and the credits after them (zeros at the beginning).

    A data set's credit is the rows it should have had minus the rows it had. Of those that can take a row without
    getting too far ahead, the one with the earliest deadline gets it (Tijdeman's chairman assignment). With constant
    shares no credit ever leaves (-1, 1), which giving each row to the largest credit does not guarantee.
    """
    credit = list(credits)
    margin = 1.0 / max(2 * len(shares) - 2, 1)
    active = [i for i, share in enumerate(shares) if share > 0]
    chosen = np.zeros(rows, np.int64)
    for row in range(rows):
        for i in active:
            credit[i] += shares[i]
        ready = [i for i in active if credit[i] >= margin - 1e-9]
        if ready:
            pick = min(ready, key=lambda i: (1.0 - margin - credit[i]) / shares[i])
        else:  # only after the shares have changed
            pick = max(active, key=lambda i: credit[i])
        credit[pick] -= 1.0
        chosen[row] = pick
    return chosen, credit


def _check_weights(weights: Mapping[str, float]) -> None:
    if not sum(weights.values()) > 0:
        raise BraidError("at least one weight must be above zero")


def _check_names(points: Sequence[CurriculumPoint], tokens: Mapping[str, int]) -> None:
    named = {name for point in points for name in point.weights}
    unknown = [
        f"a weight is given for '{n}', which is no data set.{did_you_mean(n, tokens)}" for n in named - set(tokens)
    ]
    unweighted = [f"data set '{n}' has no weight; give it one (0 to leave it out)" for n in tokens if n not in named]
    if unknown or unweighted:
        raise BraidError("\n".join([*sorted(unknown), *unweighted]), "mix")
