"""Token sequences as rows of prefix trees: what several sequences begin with stands in a row, and is computed, once.

Sequences are sorted, so that those with a common beginning are neighbours, and laid into rows of about `ROW` tokens. In
a row every distinct prefix is one place, in the order of a walk that visits a place before what follows it. The places
after place `i` up to `ends[i]` are then exactly those that have `i` before them, and a place may attend to `i` and
nothing else outside its own past if `i <= place < ends[i]`. The last token of a sequence is only ever predicted, never
read, so it has no place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

ROW = 128
"""Places of a row. Longer rows share more and cost more attention; for sentences of a dozen tokens this is best."""


STEP = 32
"""Trees are filled up to multiples of this: a model sees few shapes, and may have to try out ways for each of them."""


@dataclass(frozen=True)
class Request:
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

    @property
    def is_chain(self) -> bool:
        """Whether it is a single sequence, which needs no mask but the causal one."""
        return bool((self.ends == len(self.ends)).all())

    @property
    def width(self) -> int:
        """Its places when filled up; a chain is not."""
        return len(self) if self.is_chain else -(-len(self) // STEP) * STEP


class Forest:
    """All rows of some requests; which they are depends on the requests alone, never on how many run at once."""

    def __init__(self, requests: Sequence[Request], share: bool = True, row: int = ROW):
        counts = np.array([len(request.ids) - request.first for request in requests], dtype=np.int64)
        self.bounds = np.concatenate(([0], np.cumsum(counts)))
        """[requests + 1] where the scores of each request begin."""
        self.rows = list(_rows(requests, self.bounds, share, row))
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


def _rows(requests: Sequence[Request], bounds: np.ndarray, share: bool, size: int) -> Iterator[Row]:
    order = sorted(range(len(requests)), key=lambda index: tuple(requests[index].ids))
    tree = _Tree()
    for index in order:
        request = requests[index]
        if len(request.ids) <= request.first:  # nothing to score
            continue
        if tree.tokens and not (share and tree.has_room(request.ids, size)):
            yield tree.row()
            tree = _Tree()
        tree.add(request, int(bounds[index]))
    if tree.tokens:
        yield tree.row()


class _Tree:
    """A row in the making: sequences are added in sorted order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.ends: list[int] = []
        self.sources: list[np.ndarray] = []
        self.targets: list[Sequence[int]] = []
        self.where: list[np.ndarray] = []
        self.path = np.empty(0, dtype=np.int64)
        """The places of the sequence added last."""

    def shared(self, ids: Sequence[int]) -> int:
        """How many of its tokens that are read stand here already, along the sequence added last."""
        most = min(len(self.path), len(ids) - 1)
        count = 0
        while count < most and self.tokens[self.path[count]] == ids[count]:
            count += 1
        return count

    def has_room(self, ids: Sequence[int], size: int) -> bool:
        """Whether a sequence fits into a row of `size`; long ones that have most in common may make it longer."""
        read = len(ids) - 1
        adds = read - self.shared(ids)
        whole = len(self.tokens) + adds
        return whole <= size or (2 * adds <= read and whole <= 2 * read)

    def add(self, request: Request, at: int) -> None:
        begin, shared, length = len(self.tokens), self.shared(request.ids), len(request.ids) - 1
        new = length - shared
        self.tokens += request.ids[shared:length]
        self.depths += range(shared, length)
        self.ends += [begin + new] * new
        for place in self.path[:shared]:
            self.ends[place] = begin + new
        self.path = np.concatenate((self.path[:shared], np.arange(begin, begin + new)))
        self.sources.append(self.path[request.first - 1 :])
        self.targets.append(request.ids[request.first :])
        self.where.append(np.arange(at, at + len(request.ids) - request.first))

    def row(self) -> Row:
        return Row(
            tokens=np.array(self.tokens, dtype=np.int64),
            depths=np.array(self.depths, dtype=np.int64),
            ends=np.array(self.ends, dtype=np.int64),
            sources=np.concatenate(self.sources),
            targets=np.concatenate([np.asarray(targets, dtype=np.int64) for targets in self.targets]),
            where=np.concatenate(self.where),
        )
