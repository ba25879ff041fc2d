"""Ranges of numbers: a field's declaration says which it may have (`layers: Layers`), and decoding checks them.

Upper limits are far above any model that was ever trained: they refuse a slip of the keyboard, before it is built.
"""

import math
from dataclasses import dataclass
from typing import Annotated

MAX_INTEGER = 2**63 - 1  # the largest that torch, NumPy and our files can hold; Python and YAML know larger ones
MAX_ITEMS = 4096  # the most elements of a list in a configuration: stages, paths, experts


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a field may have; NaN and infinity are in no range."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            -math.inf < number < math.inf
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        """Words that follow `a number`: `from 1 to 1000`, `above 0 and below 1`."""
        if self.at_least is not None and self.at_most is not None:
            return f"from {_written(self.at_least)} to {_written(self.at_most)}"
        bounds = {"of at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{words} {_written(bound)}" for words, bound in bounds.items() if bound is not None)


def _written(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}".replace("e+0", "e").replace("e+", "e")


Count = Annotated[int, Range(at_least=1, at_most=MAX_INTEGER)]
"""How many of what there may be very many of: tokens, words, documents, steps."""
CountOrZero = Annotated[int, Range(at_least=0, at_most=MAX_INTEGER)]
Seed = Annotated[int, Range(at_least=0, at_most=MAX_INTEGER)]
Layers = Annotated[int, Range(at_least=1, at_most=1000)]
LayersOrZero = Annotated[int, Range(at_least=0, at_most=1000)]
Size = Annotated[int, Range(at_least=1, at_most=100_000)]  # channels, or the inner size of a part
Heads = Annotated[int, Range(at_least=1, at_most=1024)]
Choices = Annotated[int, Range(at_least=1, at_most=MAX_ITEMS)]  # how many named things there are, or are chosen
Pauses = Annotated[int, Range(at_least=0, at_most=1000)]  # pause tokens after a prompt
Length = Annotated[int, Range(at_least=1, at_most=100_000_000)]  # tokens of a sequence
VocabularySize = Annotated[int, Range(at_least=1, at_most=10_000_000)]
Rows = Annotated[int, Range(at_least=1, at_most=1_000_000)]  # sequences of a batch
Workers = Annotated[int, Range(at_least=1, at_most=4096)]  # processes

Share = Annotated[float, Range(at_least=0, at_most=1)]
Rate = Annotated[float, Range(at_least=0, below=1)]  # the rate of a dropout, or of a running average
Probability = Annotated[float, Range(above=0, at_most=1)]
Epsilon = Annotated[float, Range(above=0, at_most=1)]  # what keeps a division from one by zero
Positive = Annotated[float, Range(above=0, at_most=1e9)]
NonNegative = Annotated[float, Range(at_least=0, at_most=1e9)]
Temperature = Annotated[float, Range(at_least=0, at_most=1000)]
"""The temperature of sampling; 0 takes the most probable token."""
