"""A packed data set in shards as a stream, of which a training needs only a few shards at a time.

An epoch reads all shards in a random order, in groups: the chunks of a group are shuffled together, while the shards of
the next group come. Groups are parts of the stream, as buckets are of an order, so a position in them is one like any
other. All of it depends on the seed and the index alone, not on the cache, the number of processes or what was read.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from braidlm.data.loading.streams import Pacing, Subset, TokenStream, empty_part, random_permutation
from braidlm.data.packing.packed_data import PackedData
from braidlm.data.packing.sharded import ShardedData

TOGETHER = 8
"""Shards of a group; the cache needs room for two groups."""


class ShardPacing(Pacing):
    """One group after another; the numbers of later epochs go on."""

    def part_after(self, part: int) -> int:
        return part + 1


class ShardedStream(TokenStream):
    """The documents of some shards, or of a subset: the share of a subset is a share of the shards."""

    data: ShardedData

    def __init__(
        self,
        data: ShardedData,
        subset: Subset | None = None,
        name: str | None = None,
        shards: np.ndarray | None = None,
        upcoming: Sequence[int] = (),
    ):
        """`shards` are the shards of a group in their order, and `upcoming` the shards of the next group."""
        subset = subset or Subset()
        if shards is None:
            shards = subset.choose(len(data.shards))
            if not len(shards):
                raise empty_part(subset, f"{len(data.shards)} shards", data.address)
        self.shards, self._upcoming, self._is_read = shards, upcoming, False
        super().__init__(data, subset, name, np.zeros(0, np.int64))
        self.pacing = ShardPacing()
        self.tokens_of_shards = np.array([data.shards[shard].tokens for shard in shards])

    def _counts(self) -> tuple[int, int, int]:
        shards = [self.data.shards[index] for index in self.shards]
        return sum(s.documents for s in shards), sum(s.words for s in shards), sum(s.bytes for s in shards)

    def _runs(self) -> tuple[np.ndarray, np.ndarray]:
        bounds = self.data.token_bounds
        return bounds[self.shards], bounds[self.shards + 1] - bounds[self.shards]

    @property
    def parts(self) -> int:
        return -(-len(self.shards) // TOGETHER)

    @property
    def shortest_part(self) -> int:
        """The tokens of the shortest group that there can be, whatever the order."""
        return int(np.sort(self.tokens_of_shards)[: len(self.shards) // self.parts].sum())

    def part(self, number: int, seed: int) -> TokenStream:
        """A group of an epoch of `parts` groups."""
        now, following = self._group(number, seed), self._group(number + 1, seed)
        return ShardedStream(self.data, self.subset, self.name, now, following.tolist())

    def _group(self, number: int, seed: int) -> np.ndarray:
        epoch, group = divmod(number, self.parts)
        order = random_permutation(len(self.shards), "shards", seed, self.name, epoch)
        return self.shards[np.array_split(order, self.parts)[group]]

    def positions(self, starts: np.ndarray, length: int) -> np.ndarray:
        if not self._is_read:
            self.data.prefetch([*self.shards[:TOGETHER], *self._upcoming])  # text to validate on has no groups
            self._is_read = True
        return super().positions(starts, length)

    @property
    def chosen(self) -> np.ndarray:
        bounds = self.data.document_bounds
        return np.concatenate([np.arange(bounds[shard], bounds[shard + 1]) for shard in self.shards])

    @cached_property
    def document_bounds(self) -> np.ndarray:
        starts, chosen = self.data.document_starts, self.chosen
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(starts[chosen + 1] - starts[chosen])])

    def fingerprint(self) -> dict[str, Any]:
        """A saved position is one in these shards."""
        return super().fingerprint() | {"shards": self.data.sha256, "together": TOGETHER}


def stream_of(data: PackedData, subset: Subset | None = None, name: str | None = None) -> TokenStream:
    """A data set, or a share of it, as a stream."""
    return (ShardedStream if isinstance(data, ShardedData) else TokenStream)(data, subset, name)  # type: ignore[arg-type]
