"""How a training goes through documents that have an order: part by part, or from a pool that grows.

A pacing divides the ordered text into parts and says which one a batch is drawn from. It depends only on progress and
on the part before, so that a run that is resumed reads what it would have read.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from braidlm.model.config.ranges import Probability, Range
from braidlm.model.config.registry import Registry

pacings = Registry("pacing")

Parts = Annotated[int, Range(at_least=1, at_most=1000)]


class Pacing:
    """The contract of every pacing."""

    Config: Any

    def __init__(self, config: Any):
        self.config = config

    def parts(self) -> list[tuple[float, float]]:
        """Where each part begins and ends, as shares of the tokens of the ordered text."""
        raise NotImplementedError("abstract: each pacing has its own parts")

    def part_at(self, part: int, progress: float) -> int:
        """The part that a batch at this progress of the training is drawn from, after one from `part`."""
        raise NotImplementedError("abstract: each pacing has its own rule")

    def part_after(self, part: int) -> int:
        """The part that follows when all of `part` was read."""
        raise NotImplementedError("abstract: each pacing has its own rule")


@pacings.register("sorted")
class SortedPacing(Pacing):
    """Each epoch reads the buckets one after another, from the first documents to the last; within one it shuffles."""

    @dataclass
    class Config:
        buckets: Parts = 10
        """How many parts of equal size: 1 shuffles everything, many come near to the exact order."""

    def parts(self) -> list[tuple[float, float]]:
        count = self.config.buckets
        return [(bucket / count, (bucket + 1) / count) for bucket in range(count)]

    def part_at(self, part: int, progress: float) -> int:
        return part

    def part_after(self, part: int) -> int:
        return (part + 1) % int(self.config.buckets)


@dataclass
class Growth:
    """Options of pools that grow."""

    start: Probability = 0.2
    """The share of the text in the pool at the beginning."""
    full: Probability = 0.5
    """The progress of the training at which all of the text is in the pool."""
    levels: Parts = 10
    """How many steps the pool grows in; each begins a new epoch of the larger pool."""


class GrowingPool(Pacing):
    """The pool has the first documents; it never shrinks, also where a larger budget sets the progress back."""

    Config = Growth

    def parts(self) -> list[tuple[float, float]]:
        start, levels = self.config.start, self.config.levels
        return [(0.0, start + (1 - start) * level / levels) for level in range(levels + 1)]

    def part_at(self, part: int, progress: float) -> int:
        """The level that is due; levels are of equal size, and the share of the pool says how many were reached."""
        start, levels = self.config.start, self.config.levels
        grown = min(progress / self.config.full, 1.0)
        due = (self.share(grown) - start) / (1 - start) if start < 1 else 1.0
        # Rounding must not hide a level that is reached exactly.
        return max(part, min(int(due * levels + 1e-9), levels))

    def part_after(self, part: int) -> int:
        return part

    def share(self, grown: float) -> float:
        """The share of the text in the pool, from `start` at 0 to everything at 1."""
        raise NotImplementedError("abstract: each pool has its own curve")


@pacings.register("linear")
class LinearPool(GrowingPool):
    """Batches are drawn from a pool of the first documents, which grows evenly."""

    def share(self, grown: float) -> float:
        return float(self.config.start + (1 - self.config.start) * grown)


@pacings.register("root")
class RootPool(GrowingPool):
    """As `linear`, but quick at first: the square of the pool's share grows evenly (Platanios et al., 2019)."""

    def share(self, grown: float) -> float:
        return math.sqrt(self.config.start**2 + (1 - self.config.start**2) * grown)
