"""Shorter sequences at the beginning of a training.

A sequence of the data is cut into several rows, and a step has as many tokens whatever their length. The rows of a
step are of different sequences, each of which is read to its end in the steps that follow, so that an epoch is what it
is without them. Attention over short rows costs less, and more of what is learnt follows little text, as in a test of
single sentences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from braidlm.core.errors import BraidError
from braidlm.data.loading.config import DataConfig
from braidlm.model.config.ranges import Length, Probability
from braidlm.training.features.feature import Feature, Part, Setup, feature


@dataclass
class ShorterRows:
    """A part of the training with shorter sequences."""

    until: Probability
    """The share of the training at which this part ends, with the sequences that are begun."""
    length: Length
    """Tokens of a row; it divides `data.length`."""


@feature("training.lengths")
class Lengths(Feature):
    """The length of rows over the training."""

    @dataclass
    class Keys:
        lengths: list[ShorterRows] = field(default_factory=list)
        """Shorter sequences at first: `[{until: 0.5, length: 128}]` cuts every sequence of the data into rows of 128
        tokens until half of the training is done. A step has as many tokens, so that batch and rate need not change."""

    excludes: ClassVar = {
        "training.memory": (
            "rows with a memory of the text before them keep their length",
            "Leave out training.lengths, or the memory (data.chunking=consecutive, training.memory).",
        ),
        "data.pauses": ("pauses are counted for whole sequences", "Leave out training.lengths, or data.pauses."),
    }

    def __init__(self, rows: Sequence[ShorterRows]):
        self.rows = rows

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        return [cls(setup.training.lengths)] if setup.training.lengths else []

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        ends = [rows.until for rows in training.lengths]
        if ends != sorted(set(ends)):
            yield BraidError("training.lengths: each part must end after the one before it; order them by `until`")
        for length in (rows.length for rows in training.lengths if data.length % rows.length):
            yield BraidError(
                f"training.lengths: sequences of data.length, {data.length} tokens, do not make rows of {length}",
                todo="Give a length that divides data.length.",
            )

    def row_length(self, share: float) -> int | None:
        return next((rows.length for rows in self.rows if share < rows.until), None)

    def attended(self, parts: Sequence[Part]) -> Sequence[Part]:
        ((_, whole),) = parts
        ends = [0.0, *(rows.until for rows in self.rows), 1.0]
        lengths = [*(rows.length for rows in self.rows), whole]
        return [(end - begin, length) for begin, end, length in zip(ends[:-1], ends[1:], lengths, strict=True)]
