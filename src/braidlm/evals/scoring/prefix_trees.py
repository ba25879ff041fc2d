"""Token sequences as rows of prefix trees: a prefix that several sequences share is stored, and computed, once.

Sequences are sorted, so that those with a common prefix are neighbours, and packed into rows of about `ROW` nodes. A
node is one distinct prefix, and nodes stand in depth-first order. The descendants of node `i` are then exactly the
nodes after it up to `subtree_ends[i]`: node `j` attends to node `i` if `i <= j < subtree_ends[i]`. The last token of a
sequence is only predicted and never read, so it has no node.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from braidlm.evals.scoring.requests import Request

ROW = 128
"""Nodes of a row. Longer rows share more and cost more attention; for sentences of a dozen tokens this is best."""
WIDTH_MULTIPLE = 32
"""Trees are padded to multiples of this, so that a model sees few shapes."""


@dataclass(frozen=True)
class TreeRow:
    """One tree, or several side by side."""

    tokens: np.ndarray
    """[nodes] token ids."""
    positions: np.ndarray
    """[nodes] positions in their own sequences."""
    subtree_ends: np.ndarray
    """[nodes] one past the last descendant."""
    predictors: np.ndarray
    """[scores] the node that predicts."""
    targets: np.ndarray
    """[scores] the token to predict there."""
    score_indices: np.ndarray
    """[scores] the index among all scores: request by request, their tokens in order."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether it is a single sequence, for which the causal mask is enough."""
        return bool((self.subtree_ends == len(self.subtree_ends)).all())

    @property
    def width(self) -> int:
        """The number of nodes with padding; a chain is not padded."""
        return len(self) if self.is_chain else -(-len(self) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


class PrefixTrees:
    """All rows of some requests; the rows depend on the requests alone, never on how many run at once."""

    def __init__(
        self, requests: Sequence[Request], share: bool = True, row: int = ROW, parts: Sequence[int] | None = None
    ):
        """`parts` counts how many consecutive requests are windows of one: their scores count as one request's."""
        counts = np.array([len(request.ids) - request.first for request in requests], dtype=np.int64)
        bounds = np.concatenate(([0], np.cumsum(counts)))
        self.bounds = bounds if parts is None else bounds[np.concatenate(([0], np.cumsum(parts, dtype=np.int64)))]
        """[requests + 1] where the scores of each request (or of all of its parts) begin."""
        builder = _RowBuilder()
        for index, shared in _in_order(requests):  # requests are many and short: little is done for each
            ids, first = requests[index]
            length = len(ids) - 1
            added, total = length - shared, builder.size + length - shared
            # A long sequence that shares most of its nodes may extend the row.
            if not (share and builder.begins and (total <= row or (2 * added <= length and total <= 2 * length))):
                builder.begin()
                shared = 0
            builder.add(ids, first, shared, int(bounds[index]))
        self.rows = builder.build()
        self.nodes = sum(map(len, self.rows))

    def passes(self, max_tokens: int) -> Iterator[list[TreeRow]]:
        """Rows of one width that run together, of at most `max_tokens` nodes (or a single longer row).

        Chains run only with chains of their own length, so that they need neither padding nor a mask.
        """
        by_shape: dict[tuple[bool, int], list[TreeRow]] = {}
        for row in self.rows:
            by_shape.setdefault((row.is_chain, row.width), []).append(row)
        for (_, width), rows in sorted(by_shape.items()):
            size = max(1, max_tokens // max(1, width))
            yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _in_order(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    """The requests that have tokens to score, sorted by their ids, each with the length of the prefix (without the last
    token) that it shares with the one before it."""
    scored = [index for index, (ids, first) in enumerate(requests) if len(ids) > first]
    lengths = np.array([len(requests[index].ids) for index in scored], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    all_ids = itertools.chain.from_iterable(requests[index].ids for index in scored)
    flat = np.fromiter(all_ids, dtype=np.dtype(">u4"), count=int(lengths.sum()))
    # As big-endian bytes, sequences sort as their numbers do and are compared at once.
    whole, edges = flat.tobytes(), (4 * starts).tolist()
    keys = [whole[begin:end] for begin, end in itertools.pairwise([*edges, len(whole)])]
    order = np.array(sorted(range(len(scored)), key=keys.__getitem__), dtype=np.int64)
    shared = _shared_prefixes(flat, starts[order], lengths[order] - 1)
    return zip([scored[index] for index in order], shared.tolist(), strict=True)


def _shared_prefixes(flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sequences] the length of the prefix that each shares with the one before; all sequences at once, by token."""
    shared = np.zeros(len(starts), dtype=np.int64)
    max_lengths = np.minimum(lengths[1:], lengths[:-1])
    alive, depth = np.arange(1, len(starts)), 0
    while len(alive):
        alive = alive[max_lengths[alive - 1] > depth]
        alive = alive[flat[starts[alive] + depth] == flat[starts[alive - 1] + depth]]
        depth += 1
        shared[alive] = depth
    return shared


class _RowBuilder:
    """Builds rows from sequences that are added in sorted order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.subtree_ends: list[int] = []
        self.predictors: list[int] = []
        self.targets: list[int] = []
        self.score_indices: list[int] = []
        self.begins: list[tuple[int, int]] = []
        """Where each row's nodes and scores begin in these lists."""
        self.branch: list[int] = []
        """The nodes of the sequence added last, in its row."""
        self.size = 0
        """Nodes of the current row."""

    def begin(self) -> None:
        self._close(0)
        self.begins.append((len(self.tokens), len(self.score_indices)))
        self.size = 0

    def add(self, ids: Sequence[int], first: int, shared: int, score_index: int) -> None:
        """Add a sequence, whose scores are those from `score_index` on, to this row."""
        length, begin = len(ids) - 1, self.size
        self._close(shared)
        self.size += length - shared
        self.tokens += ids[shared:length]
        self.positions += range(shared, length)
        self.subtree_ends += [0] * (length - shared)  # set by `_close`
        self.branch += range(begin, self.size)
        self.predictors += self.branch[first - 1 :]
        self.targets += ids[first:]
        self.score_indices += range(score_index, score_index + len(ids) - first)

    def _close(self, shared: int) -> None:
        """End the subtrees of the last sequence's nodes beyond the first `shared`: they have no more descendants."""
        begin = self.begins[-1][0] if self.begins else 0
        for node in self.branch[shared:]:
            self.subtree_ends[begin + node] = self.size
        del self.branch[shared:]

    def build(self) -> list[TreeRow]:
        self._close(0)
        of_nodes = [np.array(values, dtype=np.int64) for values in (self.tokens, self.positions, self.subtree_ends)]
        of_scores = [np.array(values, dtype=np.int64) for values in (self.predictors, self.targets, self.score_indices)]
        ends = [*self.begins, (len(self.tokens), len(self.score_indices))]
        return [
            TreeRow(*(each[node:next_node] for each in of_nodes), *(each[score:next_score] for each in of_scores))
            for (node, score), (next_node, next_score) in itertools.pairwise(ends)
        ]
