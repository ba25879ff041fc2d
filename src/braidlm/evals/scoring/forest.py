"""Token sequences as rows of prefix trees: what several sequences begin with stands in a row, and is computed, once.

Sequences are sorted, so that those with a common beginning are neighbours, and laid into rows of about `ROW` tokens. In
a row every distinct prefix is one place, in the order of a walk that visits a place before what follows it. The places
after place `i` up to `ends[i]` are then exactly those that have `i` before them, and a place may attend to `i` and
nothing else outside its own past if `i <= place < ends[i]`. The last token of a sequence is only ever predicted, never
read, so it has no place.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

ROW = 128
"""Places of a row. Longer rows share more and cost more attention; for sentences of a dozen tokens this is best."""


STEP = 32
"""Trees are filled up to multiples of this: a model sees few shapes, and may have to try out ways for each of them."""


class Request(NamedTuple):
    """Token ids, of which those from `first` on are to be scored, each given all before it."""

    ids: Sequence[int]
    first: int = 1


@dataclass(frozen=True)
class Row:
    """One tree, or several side by side."""

    tokens: np.ndarray
    """[places] token ids."""
    depths: np.ndarray
    """[places] positions in their own sequences."""
    ends: np.ndarray
    """[places] one past the last place that has this one before it."""
    sources: np.ndarray
    """[scores] the place that predicts."""
    targets: np.ndarray
    """[scores] the token to predict there."""
    where: np.ndarray
    """[scores] which of all scores this is: requests one after another, their tokens in order."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether it is a single sequence, which needs no mask but the causal one."""
        return bool((self.ends == len(self.ends)).all())

    @property
    def width(self) -> int:
        """Its places when filled up; a chain is not."""
        return len(self) if self.is_chain else -(-len(self) // STEP) * STEP


class Forest:
    """All rows of some requests; which they are depends on the requests alone, never on how many run at once."""

    def __init__(
        self, requests: Sequence[Request], share: bool = True, row: int = ROW, parts: Sequence[int] | None = None
    ):
        """`parts` are how many of the requests, one after another, are parts of one: their scores count as its own."""
        counts = np.array([len(request.ids) - request.first for request in requests], dtype=np.int64)
        bounds = np.concatenate(([0], np.cumsum(counts)))
        self.bounds = bounds if parts is None else bounds[np.concatenate(([0], np.cumsum(parts, dtype=np.int64)))]
        """[requests + 1] where the scores of each request (or of all of its parts) begin."""
        self.rows = _rows(requests, bounds, share, row)
        self.places = sum(map(len, self.rows))

    def passes(self, most: int) -> Iterator[list[Row]]:
        """Rows of one width that run together, of at most `most` places (or a single longer row).

        Chains run with chains of their own length, so that nothing has to be filled up or hidden.
        """
        alike: dict[tuple[bool, int], list[Row]] = {}
        for row in self.rows:
            alike.setdefault((row.is_chain, row.width), []).append(row)
        for (_, width), rows in sorted(alike.items()):
            size = max(1, most // max(1, width))
            yield from (rows[at : at + size] for at in range(0, len(rows), size))


def _rows(requests: Sequence[Request], bounds: np.ndarray, share: bool, size: int) -> list[Row]:
    """Requests are many and short: what is done for each is little, and all rows become arrays at once."""
    rows = _Rows()
    for index, alike in _in_order(requests):
        ids, first = requests[index]
        if not (share and rows.has_room(len(ids) - 1, alike, size)):
            rows.begin()
            alike = 0
        rows.add(ids, first, alike, int(bounds[index]))
    return rows.made()


def _in_order(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    """The requests that have something to score, sorted by their tokens, each with how many of its tokens that are read
    it has in common with those of the one before."""
    asked = [index for index, (ids, first) in enumerate(requests) if len(ids) > first]
    lengths = np.array([len(requests[index].ids) for index in asked], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    every = itertools.chain.from_iterable(requests[index].ids for index in asked)
    flat = np.fromiter(every, dtype=np.dtype(">u4"), count=int(lengths.sum()))
    # As bytes, the high ones first, sequences have the order of their numbers, and are compared at once.
    whole, edges = flat.tobytes(), (4 * starts).tolist()
    keys = [whole[begin:end] for begin, end in itertools.pairwise([*edges, len(whole)])]
    order = np.array(sorted(range(len(asked)), key=keys.__getitem__), dtype=np.int64)
    alike = _alike(flat, starts[order], lengths[order] - 1)
    return zip([asked[at] for at in order], alike.tolist(), strict=True)


def _alike(flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sequences] how many tokens each begins with as the one before does; all at once, token by token."""
    found = np.zeros(len(starts), dtype=np.int64)
    most = np.minimum(lengths[1:], lengths[:-1])
    which, at = np.arange(1, len(starts)), 0
    while len(which):
        which = which[most[which - 1] > at]
        which = which[flat[starts[which] + at] == flat[starts[which - 1] + at]]
        at += 1
        found[which] = at
    return found


class _Rows:
    """Rows in the making: sequences are added in sorted order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.ends: list[int] = []
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.where: list[int] = []
        self.begins: list[tuple[int, int]] = []
        """Where each row's places and scores begin in these."""
        self.path: list[int] = []
        """The places of the sequence added last, in its row."""
        self.size = 0
        """Places of the row that is being made."""

    def has_room(self, read: int, alike: int, size: int) -> bool:
        """Whether a sequence fits into this row of `size`; long ones that have most in common may make it longer."""
        adds = read - alike
        whole = self.size + adds
        return bool(self.begins) and (whole <= size or (2 * adds <= read and whole <= 2 * read))

    def begin(self) -> None:
        """A new row."""
        self._close(0)
        self.begins.append((len(self.tokens), len(self.where)))
        self.size = 0

    def add(self, ids: Sequence[int], first: int, alike: int, at: int) -> None:
        """A sequence, whose scores are those from `at` on, to this row."""
        read, begin = len(ids) - 1, self.size
        self._close(alike)
        self.size += read - alike
        self.tokens += ids[alike:read]
        self.depths += range(alike, read)
        self.ends += [0] * (read - alike)  # known when what comes next is
        self.path += range(begin, self.size)
        self.sources += self.path[first - 1 :]
        self.targets += ids[first:]
        self.where += range(at, at + len(ids) - first)

    def _close(self, alike: int) -> None:
        """Nothing more will have those places before it that come after the first `alike` of the last sequence."""
        begin = self.begins[-1][0] if self.begins else 0
        for place in self.path[alike:]:
            self.ends[begin + place] = self.size
        del self.path[alike:]

    def made(self) -> list[Row]:
        """All of them."""
        self._close(0)
        fields = (self.tokens, self.depths, self.ends, self.sources, self.targets, self.where)
        tokens, depths, ends, sources, targets, where = (np.array(values, dtype=np.int64) for values in fields)
        found = []
        for (begin, score), (end, last) in itertools.pairwise([*self.begins, (len(tokens), len(where))]):
            places, scores = slice(begin, end), slice(score, last)
            found.append(
                Row(tokens[places], depths[places], ends[places], sources[scores], targets[scores], where[scores])
            )
        return found
