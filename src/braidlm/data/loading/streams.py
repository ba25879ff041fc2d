"""One packed data set, or a subset of its documents, as one circular stream of tokens."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.packing.packed_data import PackedData
from braidlm.model.config.ranges import Seed, Share

Key = str | int | float


def raw_bits(count: int, *key: Key) -> np.ndarray:
    """`count` random uint64 for a key, from a stable hash of it."""
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    # NumPy guarantees that a bit generator's raw stream never changes, but not the results of permutation().
    return np.random.PCG64(int.from_bytes(digest, "little")).random_raw(count)


def random_permutation(count: int, *key: Key) -> np.ndarray:
    """The numbers 0 .. count - 1 in a random order."""
    return np.argsort(raw_bits(count, *key), kind="stable")


def poisson_sample(count: int, probability: float, *key: Key) -> np.ndarray:
    """Those of the numbers 0 .. count - 1 that are drawn, each by itself with this probability, in their order."""
    return np.flatnonzero(raw_bits(count, "poisson", *key) / 2.0**64 < probability)


def random_integer(bound: int, *key: Key) -> int:
    """A random number in [0, bound)."""
    return int(raw_bits(1, *key)[0]) % bound


@dataclass(frozen=True)
class Subset:
    """A share of a data set's documents; shares of one seed that do not overlap have no document in common."""

    start: Share = 0.0
    """Where the share begins in the seeded random order of the documents, as a fraction."""
    stop: Share = 1.0
    """Where it ends: 0 to 0.6 and 0.6 to 1 are two parts that together are everything."""
    seed: Seed = 0
    """Seed of the order; parts that must not overlap share it."""

    def __post_init__(self) -> None:
        if self.start >= self.stop:
            raise BraidError(f"a subset needs start < stop, got start {self.start:g} and stop {self.stop:g}")

    @property
    def is_whole(self) -> bool:
        return self.start == 0.0 and self.stop == 1.0

    def choose(self, documents: int) -> np.ndarray:
        """The indices of the chosen documents, in file order so that they are read sequentially."""
        # The data set's name is not in the key, because renaming it must not move documents between subsets.
        order = random_permutation(documents, "subset", self.seed)
        return np.sort(order[round(self.start * documents) : round(self.stop * documents)])


class Pacing:
    """How the training goes through the parts of a stream; this one stays in one part."""

    def __init__(self, config: Any = None):
        self.config = config

    def parts(self) -> list[tuple[float, float]]:
        """Where each part of an order begins and ends, as shares of the tokens of the ordered text."""
        return [(0.0, 1.0)]

    def part_at(self, part: int, progress: float) -> int:
        """The part that a batch at this progress of the training is drawn from, after one from `part`."""
        return part

    def part_after(self, part: int) -> int:
        """The part that follows when all of `part` was read."""
        return part


class TokenStream:
    """The concatenated documents of a packed data set, or of a subset; the first token follows the last."""

    def __init__(
        self, data: PackedData, subset: Subset | None = None, name: str | None = None, chosen: np.ndarray | None = None
    ):
        """`chosen` documents, in their order, take the place of the subset's documents in the order of the file."""
        self.data = data
        self.name = name or data.manifest.name
        self.subset = subset or Subset()
        is_part = chosen is None and not self.subset.is_whole
        self._chosen = self.subset.choose(data.manifest.documents) if is_part else chosen
        self.pacing = Pacing()
        self.documents, self.words, self.bytes = self._counts()
        self._sources, run_lengths = self._runs()
        # Run r has the stream's tokens [_begins[r], _begins[r + 1]), which begin at _sources[r] in the file.
        self._begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(run_lengths)])
        self._size = int(self._begins[-1])
        self._tokens, self._word_starts, self._targets = data.tokens, data.word_starts, data.targets

    def _counts(self) -> tuple[int, int, int]:
        """Documents, words and bytes."""
        data, manifest = self.data, self.data.manifest
        if self._chosen is None:
            return manifest.documents, manifest.words, manifest.bytes
        if not len(self._chosen):
            raise empty_part(self.subset, f"{manifest.documents} documents", data.address)
        words, size = (int(counts[self._chosen].sum()) for counts in (data.document_words, data.document_bytes))
        return len(self._chosen), words, size

    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each run of tokens begins in the file, and its length."""
        if self._chosen is None:
            return np.zeros(1, np.int64), np.array([self.data.manifest.tokens], np.int64)
        starts, chosen = self.data.document_starts, self._chosen
        return _document_runs(starts[chosen], starts[chosen + 1])

    @property
    def parts(self) -> int:
        """How many parts epochs are cut from; several where documents have an order, or the data is in shards."""
        return 1

    @property
    def shortest_part(self) -> int:
        """Tokens of the shortest part."""
        return len(self)

    def part(self, number: int, seed: int) -> "TokenStream":
        """The part with a number that the pacing gave."""
        return self

    def __len__(self) -> int:
        return self._size

    @property
    def chosen(self) -> np.ndarray:
        """The numbers of its documents in the data set, in their order."""
        return np.arange(self.documents) if self._chosen is None else self._chosen

    def of_documents(self, documents: np.ndarray) -> "TokenStream":
        """Some documents of the data set as a stream, in this order."""
        return TokenStream(self.data, self.subset, self.name, documents)

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`length` tokens from `start` on, with how many words begin in each; circular."""
        positions = self.positions(np.array([start]), length)[0]
        tokens = self._tokens[positions]
        self.data.check_tokens(tokens)
        return tokens, self._word_starts[positions]

    def positions(self, starts: np.ndarray, length: int) -> np.ndarray:
        """[starts, length]: the file positions of the `length` tokens from each start on; circular."""
        starts = np.asarray(starts, np.int64)
        first, last = self._run_of(starts), self._run_of(starts + length - 1)
        counts = last - first + 1
        row = np.repeat(np.arange(len(starts)), counts)
        run = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        turn, run = np.divmod(run, len(self._sources))
        begin = self._begins[run] + turn * self._size
        end = self._begins[run + 1] + turn * self._size
        overlap = np.minimum(end, starts[row] + length) - np.maximum(begin, starts[row])
        shift = np.repeat(self._sources[run] - begin, overlap)
        return starts[:, None] + np.arange(length) + shift.reshape(len(starts), length)

    def tokens_at(self, positions: np.ndarray) -> np.ndarray:
        """The tokens at file positions, as int64."""
        tokens = self._tokens.take(positions).astype(np.int64)
        self.data.check_tokens(tokens)
        return tokens

    def word_starts_at(self, positions: np.ndarray) -> np.ndarray:
        """How many words begin in the tokens at file positions, as uint8."""
        return self._word_starts.take(positions)

    @property
    def has_prompts(self) -> bool:
        """Whether some of its tokens are only read and never predicted."""
        return self._targets is not None

    def targets_at(self, positions: np.ndarray) -> np.ndarray:
        """Which tokens at file positions are to be predicted, as bool."""
        if self._targets is None:
            return np.ones(positions.shape, bool)
        return self._targets.take(positions).astype(bool)

    @cached_property
    def document_bounds(self) -> np.ndarray:
        """[documents + 1]: where each document begins in the stream, and where the last one ends."""
        starts = self.data.document_starts
        if self._chosen is None:
            return starts[:]
        lengths = starts[self._chosen + 1] - starts[self._chosen]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def first_documents(self, max_tokens: int | None) -> tuple[int, int, int]:
        """Tokens, words and bytes to predict of the first whole documents within `max_tokens`, at least of one."""
        if (max_tokens is None or max_tokens >= len(self)) and not self.has_prompts:
            return len(self), self.words, self.bytes
        bounds = self.document_bounds
        count = whole_documents(bounds, max_tokens)
        chosen = self.chosen[:count]
        words = self.data.document_words[chosen].sum(dtype=np.int64)
        return int(bounds[count]), int(words), int(self.data.document_target_bytes[chosen].sum(dtype=np.int64))

    def fingerprint(self) -> dict[str, Any]:
        """Values that must be equal for a saved position in this stream to mean the same tokens."""
        manifest = self.data.manifest
        return {
            "tokenizer": manifest.tokenizer,
            "tokens": manifest.tokens,
            "documents": manifest.documents,
            "words": manifest.words,
            "bytes": manifest.bytes,
            "subset": asdict(self.subset),
            **({} if manifest.targets is None else {"targets": asdict(manifest.targets)}),
        }

    def _run_of(self, positions: np.ndarray) -> np.ndarray:
        """The run of each stream position; every time around the circle adds the number of runs."""
        turn, offset = np.divmod(positions, self._size)
        return turn * len(self._sources) + np.searchsorted(self._begins, offset, side="right") - 1


def whole_documents(bounds: np.ndarray, limit: int | None) -> int:
    """How many of the first documents between `bounds` [documents + 1] are within `limit`, at least one."""
    if limit is None:
        return len(bounds) - 1
    return max(1, int(np.searchsorted(bounds[1:], limit, side="right")))


def empty_part(subset: Subset, total: str, where: str) -> BraidError:
    """The error for a subset that has nothing."""
    what = f"the part from {subset.start:g} to {subset.stop:g} of {total} is empty"
    return BraidError(what, where, "Take a larger part, or more documents.")


def _document_runs(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """File start and length of each run of adjacent documents."""
    first = np.flatnonzero(np.concatenate([[True], starts[1:] != stops[:-1]]))
    last = np.append(first[1:], len(starts)) - 1
    lengths = stops[last] - starts[first]
    nonempty = lengths > 0
    if not nonempty.any():
        nonempty[0] = True  # an empty stream is one empty run
    return starts[first][nonempty], lengths[nonempty]
