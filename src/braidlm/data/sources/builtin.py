"""The built-in corpora, which are computed and not stored."""

import hashlib
from collections.abc import Iterator
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.corpora.builtin import document
from braidlm.data.sources.format import FORMATS, Format, Reading, Shard

GUESS = 16
"""Documents looked at to guess how long the others are."""


@FORMATS.register("builtin")
class BuiltIn(Format):
    """`stories` and `maths`: a piece is a range of document numbers."""

    def plan(self, place: str, reading: Reading, shard_bytes: int) -> list[Shard]:
        if reading.documents < 1:
            raise BraidError(f"{reading.documents} documents of a corpus are no data", place, "Give `--documents N`.")
        sizes = [len(document(place, reading.seed, reading.first + number)) for number in range(GUESS)]
        each = max(1, sum(sizes) // GUESS)
        step, end = max(1, shard_bytes // each), reading.first + reading.documents
        starts = range(reading.first, end, step)
        return [
            Shard("builtin", place, start, min(start + step, end), (min(start + step, end) - start) * each)
            for start in starts
        ]

    def documents(self, shard: Shard, reading: Reading) -> Iterator[str]:
        return (document(shard.place, reading.seed, number) for number in range(shard.start, shard.stop))

    def facts(self, place: str, reading: Reading) -> dict[str, Any]:
        # The text changes when the generator does: look at its first documents.
        sample = "\0".join(document(place, reading.seed, reading.first + number) for number in range(GUESS))
        return {"corpus": place, "sample": hashlib.sha256(sample.encode()).hexdigest()}
