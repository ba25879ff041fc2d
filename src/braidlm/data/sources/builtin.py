"""The built-in corpora, which are computed and not stored."""

import hashlib
from collections.abc import Iterator
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.corpora.builtin import CORPORA, PROBLEMS, document, documents
from braidlm.data.sources.format import FORMATS, Format, Piece, ReadOptions, Shard, document_of

SAMPLED = 16
"""Documents whose length estimates that of the others."""


@FORMATS.register("builtin")
class BuiltIn(Format):
    """`stories`, `maths` and `arithmetic`: a shard is a range of document numbers."""

    names = tuple(CORPORA)
    start_unit = "document"

    def has_fields(self, source: str) -> bool:
        return source in PROBLEMS

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        if options.documents < 1:
            raise BraidError(f"{options.documents} documents of a corpus are no data", source, "Give `--documents N`.")
        sizes = [len(document(source, options.seed, options.first + number)) for number in range(SAMPLED)]
        each = max(1, sum(sizes) // SAMPLED)
        step, end = max(1, shard_bytes // each), options.first + options.documents
        starts = range(options.first, end, step)
        return [
            Shard("builtin", source, start, min(start + step, end), (min(start + step, end) - start) * each)
            for start in starts
        ]

    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        return (document(shard.source, options.seed, number) for number in range(shard.start, shard.stop))

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        """With an answer, documents are made from the corpus's fields `question` and `answer`."""
        if options.answer is None:
            return super().pieces(shard, options)
        problem, numbers = PROBLEMS[shard.source], range(shard.start, shard.stop)
        return (document_of(problem(options.seed, number).row, options, f"{shard.source}, {number}") for number in numbers)

    def fingerprint(self, source: str, options: ReadOptions) -> dict[str, Any]:
        # The text changes when the generator does, so its first documents are hashed.
        sample = "\0".join(document(source, options.seed, options.first + number) for number in range(SAMPLED))
        return {"corpus": source, "sample": hashlib.sha256(sample.encode()).hexdigest()}
