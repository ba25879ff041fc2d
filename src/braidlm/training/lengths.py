"""Shorter sequences at the beginning of a training.

A sequence of the data is cut into several rows, and a step has as many tokens whatever their length. The rows of a
step are of different sequences, each of which is read to its end in the steps that follow, so that an epoch is what it
is without them. Attention over short rows costs less, and more of what is learnt follows little text, as in a test of
single sentences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import Length, Probability


@dataclass
class ShorterRows:
    """A part of the training with shorter sequences."""

    until: Probability
    """The share of the training at which this part ends, with the sequences that are begun."""
    length: Length
    """Tokens of a row; it divides `data.length`."""


def check_lengths(parts: Sequence[ShorterRows], length: int) -> None:
    """Refuse parts that are not in order, and lengths that do not divide that of the data's sequences."""
    ends = [part.until for part in parts]
    if ends != sorted(set(ends)):
        raise BraidError("training.lengths: each part must end after the one before it; order them by `until`")
    for part in parts:
        if length % part.length:
            raise BraidError(
                f"training.lengths: sequences of data.length, {length} tokens, do not make rows of {part.length}",
                todo="Give a length that divides data.length.",
            )


def length_at(parts: Sequence[ShorterRows], share: float) -> int | None:
    """The length of rows when this share of the training is done; None for whole sequences."""
    return next((part.length for part in parts if share < part.until), None)


def shares_of_lengths(parts: Sequence[ShorterRows], length: int) -> list[tuple[float, int]]:
    """Each share of the training with the length of its rows, where sequences have `length` tokens."""
    ends = [0.0, *(part.until for part in parts), 1.0]
    lengths = [*(part.length for part in parts), length]
    return [(end - begin, rows) for begin, end, rows in zip(ends[:-1], ends[1:], lengths, strict=True)]
