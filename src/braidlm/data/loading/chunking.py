"""How a stream is cut into chunks, and their order in an epoch. Each method is a named choice.

A chunk of length T is read as T + 1 tokens, inputs [:T] and labels [1:], so that the last position predicts the
token that really follows. An epoch depends only on the seed, the data set's name and the epoch's number.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count as count_from
from math import gcd
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.loading.batches import cut_at
from braidlm.data.loading.streams import TokenStream, random_integer, random_permutation
from braidlm.model.config.ranges import Count
from braidlm.model.config.registry import Registry

chunkings = Registry("chunking")

_TOKENS_PER_BLOCK = 1 << 20
"""How many tokens' words are counted at a time."""


class Chunking:
    """A method of cutting a stream; a new one is a subclass with its own `Config` and `starts`, registered by name."""

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any = None):
        self.config: Any = config if config is not None else self.Config()
        self.words_per_epoch: int | None = getattr(self.config, "words_per_epoch", None)
        """How many words make an epoch; None if an epoch is the whole stream."""

    keeps_rows = False
    """Whether a row of the batch reads on where it stopped: then each data set has the same rows in every batch."""

    def starts(self, stream: TokenStream, length: int, epoch: int, seed: int, rows: int = 1) -> np.ndarray:
        """The positions in the stream where the epoch's chunks begin, in their order; int64, never empty.

        `rows` of each batch are the data set's; they take the next chunks.
        """
        raise NotImplementedError("abstract: each chunking has its own starts")

    def trained_lengths(self, stream: TokenStream, starts: np.ndarray, length: int) -> np.ndarray:
        """How many positions of each of the epoch's chunks are trained: all, unless its text ends before."""
        return np.full(len(starts), length)

    def places(self, stream: TokenStream, starts: np.ndarray, trained: np.ndarray, length: int) -> np.ndarray:
        """[starts, length + 1]: where the tokens of chunks are in the file; `trained` positions of each are trained."""
        return stream.positions(starts, length + 1)

    def size(self, stream: TokenStream, length: int) -> int:
        """The positions of an epoch's rows, trained or not: without weights, data sets share batches in proportion."""
        return len(stream)

    def tokens(self, stream: TokenStream, length: int) -> int:
        """How many of the stream's tokens an epoch trains, but for a rest that is less than a row."""
        return len(stream)

    def unit(self, length: int) -> str | None:
        """What a row is, where it is the same in every epoch and shares no token with another; else None."""
        return None

    def warning(self, stream: TokenStream, length: int) -> str | None:
        """A warning for the user before a stream is cut, or None."""
        return None

    def as_dict(self) -> dict[str, Any]:
        """The method and the options that are set, for a saved position, which a new option leaves valid."""
        options = {name: value for name, value in asdict(self.config).items() if value is not None}
        return {"kind": type(self).__name__.lower(), **options}

    def check(self, stream: TokenStream, length: int) -> None:
        """Refuse a stream that is shorter than one chunk."""
        if len(stream) < length + 1:
            part = "" if stream.subset.is_whole else " in the chosen part"
            what = f"the data set has {len(stream)} tokens{part}, but a chunk of length {length} needs {length + 1}"
            todo = f"Prepare more text, or choose a length of at most {max(len(stream) - 1, 0)}."
            raise BraidError(what, f"data set '{stream.name}' ({stream.data.folder})", todo)

    def check_parts(self, stream: TokenStream, length: int) -> None:
        """Refuse parts that are too short for a chunk, and epochs that end before their part does."""
        if self.words_per_epoch is not None:
            what = "what is in order or in shards is read to its end, and `words_per_epoch` ends epochs before"
            raise BraidError(what, "data.chunking", "Leave it out, or use data.order=shuffled with a data set in one.")
        if stream.shortest_part < length + 1:
            what = (
                f"the shortest of the {stream.parts} parts that it is read in has {stream.shortest_part} tokens, but "
            )
            what += f"a chunk of length {length} needs {length + 1}"
            todo = (
                "Divide it into fewer parts (`data.order.pacing`), begin with a larger one, or prepare larger shards."
            )
            raise BraidError(what, f"data set '{stream.name}'", todo)


class ShuffledChunking(Chunking):
    """A method whose chunks are shuffled in every epoch, which may end after some number of words."""

    @dataclass
    class Config:
        """When an epoch ends."""

        words_per_epoch: Count | None = None
        """An epoch ends, and the chunks are shuffled anew, when exactly this many words were shown."""

    def shuffled(self, stream: TokenStream, length: int, epoch: int, seed: int) -> np.ndarray:
        """Where all chunks begin, in the epoch's order."""
        raise NotImplementedError("abstract: each shuffled chunking has its own chunks")

    def starts(self, stream: TokenStream, length: int, epoch: int, seed: int, rows: int = 1) -> np.ndarray:
        starts = self.shuffled(stream, length, epoch, seed)
        if self.words_per_epoch is None:
            return starts
        return starts[: _chunks_for(self.words_per_epoch, stream, starts, length)]

    def trained_lengths(self, stream: TokenStream, starts: np.ndarray, length: int) -> np.ndarray:
        """All positions, but in the last chunk only those up to the word that completes the epoch's words."""
        lengths = super().trained_lengths(stream, starts, length)
        if self.words_per_epoch is not None:
            before = sum(int(words.sum()) for words in _words_of(stream, starts[:-1], length))
            words = stream.word_starts_at(stream.positions(starts[-1:], length))
            lengths[-1] = cut_at(words, 0, self.words_per_epoch - before, None)
        return lengths

    def warning(self, stream: TokenStream, length: int) -> str | None:
        """A warning that a stream has fewer words than an epoch should have, and how they are repeated."""
        target = self.words_per_epoch
        if target is None:
            return None
        starts = self.shuffled(stream, length, 0, 0)
        if stream.words >= target and len(starts) * length >= len(stream) - length:
            return None
        shown = sum(int(words.sum()) for words in _words_of(stream, starts, length))
        fewer = f"data set '{stream.name}' has {stream.words:,} words, and an epoch should show {target:,}"
        if shown < target:
            return (
                f"{fewer}: epochs repeat sooner. Each ends when every chunk was shown, after {shown:,} words, "
                "and the next begins; the budget is met all the same"
            )
        if stream.words >= target:
            return None
        return f"{fewer}: chunks overlap, and an epoch repeats each word {target / stream.words:.1f} times on average"


@chunkings.register("contiguous")
class Contiguous(ShuffledChunking):
    """Adjacent chunks around the circular stream, from another offset every epoch; only len % T tokens are left out."""

    def shuffled(self, stream: TokenStream, length: int, epoch: int, seed: int) -> np.ndarray:
        order = random_permutation(len(stream) // length, "contiguous", seed, stream.name, epoch)
        return (_offset(stream, epoch, seed) + order * length) % len(stream)


@chunkings.register("consecutive")
class Consecutive(Chunking):
    """Adjacent chunks, as `contiguous`, but each row of the batch continues its chunk of the step before.

    An epoch is divided into as many runs of chunks as there are rows, and each row reads one from its beginning to its
    end.
    """

    keeps_rows = True

    def starts(self, stream: TokenStream, length: int, epoch: int, seed: int, rows: int = 1) -> np.ndarray:
        chunks = len(stream) // length
        step, row = np.divmod(np.arange(chunks), rows)
        # Where the chunks do not divide by the rows, the first rows read one more.
        order = row * (chunks // rows) + np.minimum(row, chunks % rows) + step
        return (_offset(stream, epoch, seed) + order * length) % len(stream)


@chunkings.register("windows")
class Windows(ShuffledChunking):
    """Windows that begin every `stride` tokens and may overlap."""

    @dataclass
    class Config(ShuffledChunking.Config):
        """Where windows begin and when an epoch ends."""

        stride: Count = field(kw_only=True)
        """Tokens from the beginning of one window to that of the next."""

    def shuffled(self, stream: TokenStream, length: int, epoch: int, seed: int) -> np.ndarray:
        count = (len(stream) - length - 1) // self.config.stride + 1
        return random_permutation(count, "windows", seed, stream.name, epoch) * self.config.stride

    def unit(self, length: int) -> str | None:
        return "row" if self.config.stride > length and self.words_per_epoch is None else None


@chunkings.register("documents")
class Documents(Chunking):
    """Whole documents, as many as fit; the rest of a sequence is not trained. Right for questions with answers.

    A chunk begins with the end-of-text token before its first document. Documents of one chunk see each other, as in
    the other methods; one that is longer than a chunk is cut. Every epoch begins at another document.
    """

    def starts(self, stream: TokenStream, length: int, epoch: int, seed: int, rows: int = 1) -> np.ndarray:
        bounds, size = stream.document_bounds, len(stream)
        first = random_integer(stream.documents, "documents", seed, stream.name, epoch)
        starts = document_rows(np.concatenate([bounds[first:-1], bounds[: first + 1] + size]), length) - 1
        return starts[random_permutation(len(starts), "rows", seed, stream.name, epoch)] % size

    def trained_lengths(self, stream: TokenStream, starts: np.ndarray, length: int) -> np.ndarray:
        """The tokens up to the next chunk: together the chunks are the whole circle."""
        order = np.argsort(starts)
        lengths = np.empty(len(starts), np.int64)
        lengths[order] = np.diff(starts[order], append=starts[order[0]] + len(stream))
        return lengths

    def warning(self, stream: TokenStream, length: int) -> str | None:
        """A warning that answers are cut off from their questions; other text is cut by every method."""
        longer = int((np.diff(stream.document_bounds) > length).sum())
        if not longer or not stream.has_prompts:
            return None
        return (
            f"data set '{stream.name}': {longer:,} of {stream.documents:,} documents are longer than {length} tokens; "
            "they are cut, and what follows a cut is answered without the question"
        )


@chunkings.register("single")
class Single(Chunking):
    """Every document is one row: what is longer than a row is left out, and what is shorter is filled up.

    A row begins with the end-of-text token of its own document, as after another one, and is filled up with it. So it
    holds nothing of other documents, in every epoch the same.
    """

    def starts(self, stream: TokenStream, length: int, epoch: int, seed: int, rows: int = 1) -> np.ndarray:
        return np.asarray(
            stream.document_bounds[random_permutation(stream.documents, "single", seed, stream.name, epoch)]
        )

    def trained_lengths(self, stream: TokenStream, starts: np.ndarray, length: int) -> np.ndarray:
        return np.minimum(self._ends(stream, starts) - starts, length)

    def places(self, stream: TokenStream, starts: np.ndarray, trained: np.ndarray, length: int) -> np.ndarray:
        offsets = np.minimum(np.arange(-1, length), trained[:, None] - 1)
        offsets[:, 0] = self._ends(stream, starts) - starts - 1
        return stream.positions(starts, 1) + offsets

    def size(self, stream: TokenStream, length: int) -> int:
        return stream.documents * length

    def tokens(self, stream: TokenStream, length: int) -> int:
        return int(np.minimum(np.diff(stream.document_bounds), length).sum())

    def unit(self, length: int) -> str | None:
        return "document"

    def check(self, stream: TokenStream, length: int) -> None:
        """Refuse documents that no token ends, as pieces of documents are."""
        manifest = stream.data.manifest
        if manifest.eos_id is None or "chunk_tokens" in manifest.source.get("reading", ()):
            what = "with chunking 'single' every document is a row, and no token ends the documents of this data set"
            todo = "Prepare it with a tokenizer that has an end of text and without chunk_tokens, or choose another."
            raise BraidError(what, f"data set '{stream.name}' ({stream.data.address})", todo)

    def warning(self, stream: TokenStream, length: int) -> str | None:
        """A warning that the ends of documents are never read, and how many."""
        longer, kept = int((np.diff(stream.document_bounds) > length).sum()), self.tokens(stream, length)
        if not longer:
            return None
        return (
            f"data set '{stream.name}': {longer:,} of {stream.documents:,} documents are longer than {length} tokens; "
            f"what follows is never read: {len(stream) - kept:,} of {len(stream):,} tokens"
        )

    def _ends(self, stream: TokenStream, starts: np.ndarray) -> np.ndarray:
        """Where the documents that begin at `starts` end."""
        bounds = stream.document_bounds
        return np.asarray(bounds[np.searchsorted(bounds, starts, side="right")])


def _chunks_for(words: int, stream: TokenStream, starts: np.ndarray, length: int) -> int:
    """How many chunks, in their order, contain `words` words; all chunks if they contain fewer."""
    chunks = counted = 0
    for counts in _words_of(stream, starts, length):
        total = counted + np.cumsum(counts)
        if total[-1] >= words:
            return chunks + int(np.searchsorted(total, words)) + 1
        chunks, counted = chunks + len(counts), int(total[-1])
    return len(starts)


def _words_of(stream: TokenStream, starts: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """How many words begin in each chunk, for a block of chunks at a time."""
    block = max(_TOKENS_PER_BLOCK // length, 1)
    for begin in range(0, len(starts), block):
        positions = stream.positions(starts[begin : begin + block], length)
        yield stream.word_starts_at(positions).sum(axis=1, dtype=np.int64)


def _offset(stream: TokenStream, epoch: int, seed: int) -> int:
    size = len(stream)
    # By a step near the golden section, the offsets of successive epochs are far apart; one that is coprime to the size
    # visits every offset before it repeats one.
    step = next(step for step in count_from(max(round(size * 0.618), 1)) if gcd(step, size) == 1)
    return (random_integer(size, "offset", seed, stream.name) + epoch * step) % size


def document_rows(bounds: np.ndarray, length: int) -> np.ndarray:
    """Where rows of at most `length` tokens begin, for documents between `bounds` [documents + 1], in their order.

    A row ends where the next begins. A document that is longer than a row is cut into pieces of `length` tokens.
    """
    sizes = np.diff(bounds)
    pieces = np.maximum(-(-sizes // length), 1)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    edges = np.append(np.repeat(bounds[:-1], pieces) + within * length, bounds[-1])
    furthest = (np.searchsorted(edges, edges + length, side="right") - 1).tolist()
    rows, edge = [], 0
    while edge < len(edges) - 1:
        rows.append(edge)
        edge = furthest[edge]
    return np.asarray(edges[rows])
