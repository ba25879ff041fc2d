"""How a stream is cut into chunks, and in which order an epoch shows them. Each way is a named choice.

A chunk of length T is read as T + 1 tokens, inputs [:T] and labels [1:], so that the last position predicts the
token that truly follows. An epoch depends only on the seed, the data set's name and the epoch's number.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import cut_at
from braidlm.data.loading.seeding import drawn, shuffled
from braidlm.data.loading.streams import TokenStream
from braidlm.model.config.registry import Registry

chunkings = Registry("chunking")

_COUNTED_TOGETHER = 1 << 20
"""Tokens whose words are counted at a time."""


class Chunking:
    """A way to cut a stream; a new one is a subclass with its own `Config` and `starts`, registered by name."""

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any = None):
        self.config: Any = config if config is not None else self.Config()

    def starts(self, stream: TokenStream, length: int, epoch: int, seed: int) -> np.ndarray:
        """Where in the stream the epoch's chunks begin, in the order in which they are shown; int64, never empty."""
        raise NotImplementedError("abstract: each way of cutting has its own starts")

    def last(self, stream: TokenStream, starts: np.ndarray, length: int) -> int:
        """How many positions of the epoch's last chunk are shown; all of them, unless an epoch ends within a chunk."""
        return length

    @property
    def words_per_epoch(self) -> int | None:
        """How many words of a stream make an epoch; None where an epoch is all of it."""
        return None

    def remark(self, stream: TokenStream, length: int) -> str | None:
        """What someone should know before a stream is cut in this way, or None."""
        return None

    def facts(self) -> dict[str, Any]:
        """The choice as plain data, for a saved position."""
        return {"kind": type(self).__name__.lower(), **asdict(self.config)}

    def check(self, stream: TokenStream, length: int) -> None:
        """Refuse a stream that has not one whole chunk."""
        if len(stream) < length + 1:
            part = "" if stream.subset.is_whole else " in the chosen part"
            raise BraidError(
                f"the data set has {len(stream)} tokens{part}, but a chunk of length {length} needs {length + 1}",
                f"data set '{stream.name}' ({stream.data.folder})",
                f"Prepare more text, or choose a length of at most {max(len(stream) - 1, 0)}.",
            )


@chunkings.register("contiguous")
class Contiguous(Chunking):
    """Chunks end to end round the stream, cut at another offset every epoch; only the last len % T are left out."""

    def starts(self, stream: TokenStream, length: int, epoch: int, seed: int) -> np.ndarray:
        size = len(stream)
        # Steps that share no divisor with the size visit every offset once before one comes again.
        offset = (drawn(size, "offset", seed, stream.name) + epoch * _coprime_step(size)) % size
        order = shuffled(size // length, "contiguous", seed, stream.name, epoch)
        return (offset + order * length) % size


@chunkings.register("windows")
class Windows(Chunking):
    """Windows that begin every `stride` tokens and may overlap."""

    @dataclass
    class Config:
        """Where windows begin and when an epoch ends."""

        stride: int
        """Tokens from the beginning of one window to that of the next."""
        words_per_epoch: int | None = None
        """An epoch ends, and the windows are shuffled anew, when exactly this many words were shown."""

        def __post_init__(self) -> None:
            if self.stride < 1:
                raise BraidError(f"stride must be at least 1, got {self.stride}")
            if self.words_per_epoch is not None and self.words_per_epoch < 1:
                raise BraidError(f"words_per_epoch must be at least 1, got {self.words_per_epoch}")

    def starts(self, stream: TokenStream, length: int, epoch: int, seed: int) -> np.ndarray:
        count = (len(stream) - length - 1) // self.config.stride + 1
        starts = shuffled(count, "windows", seed, stream.name, epoch) * self.config.stride
        if self.config.words_per_epoch is None:
            return starts
        return starts[: _windows_for(self.config.words_per_epoch, stream, starts, length)]

    def last(self, stream: TokenStream, starts: np.ndarray, length: int) -> int:
        """Up to the word that completes the epoch's words."""
        if self.config.words_per_epoch is None:
            return length
        before = sum(int(words.sum()) for words in _words_of(stream, starts[:-1], length))
        words = stream.word_starts_at(stream.positions(starts[-1:], length))
        return cut_at(words, 0, self.config.words_per_epoch - before, None)

    @property
    def words_per_epoch(self) -> int | None:
        return self.config.words_per_epoch

    def remark(self, stream: TokenStream, length: int) -> str | None:
        """A stream that has fewer words than an epoch should have is shown more than once; say how."""
        wanted = self.config.words_per_epoch
        if wanted is None or (stream.words >= wanted and self.config.stride <= length):
            return None
        starts = np.arange(0, len(stream) - length, self.config.stride)
        shown = sum(int(words.sum()) for words in _words_of(stream, starts, length))
        fewer = f"data set '{stream.name}' has {stream.words:,} words, and an epoch should show {wanted:,}"
        if shown < wanted:
            return (
                f"{fewer}: epochs repeat sooner. Each ends when every window was shown, after {shown:,} words, "
                "and the next begins; the budget is met all the same"
            )
        if stream.words >= wanted:
            return None
        return f"{fewer}: windows overlap, and an epoch repeats each word {wanted / stream.words:.1f} times on average"


def _windows_for(words: int, stream: TokenStream, starts: np.ndarray, length: int) -> int:
    """How many windows, taken in order, it takes to show `words` words; all of them if they hold fewer."""
    windows = seen = 0
    for counts in _words_of(stream, starts, length):
        total = seen + np.cumsum(counts)
        if total[-1] >= words:
            return windows + int(np.searchsorted(total, words)) + 1
        windows, seen = windows + len(counts), int(total[-1])
    return len(starts)


def _words_of(stream: TokenStream, starts: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """How many words begin in each window, for some windows at a time."""
    together = max(_COUNTED_TOGETHER // length, 1)
    for begin in range(0, len(starts), together):
        positions = stream.positions(starts[begin : begin + together], length)
        yield stream.word_starts_at(positions).sum(axis=1, dtype=np.int64)


def _coprime_step(size: int) -> int:
    """A step near the golden section of `size`, so that offsets of following epochs lie far apart."""
    step = max(round(size * 0.618), 1)
    while gcd(step, size) != 1:
        step += 1
    return step
