"""Sources that every machine has, by their names: the built-in corpora, and Python's standard library."""

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.corpora.builtin import CORPORA, PROBLEMS, document, documents
from braidlm.data.sources.format import FORMATS, Format, Piece, ReadOptions, Shard, consecutive_shards
from braidlm.data.sources.rows import document_of

SAMPLED = 16
"""Documents whose length estimates that of the others."""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Other packages than the standard library, and tests, which not every installation has."""


@FORMATS.register("builtin")
class BuiltIn(Format):
    """`stories`, `maths` and `arithmetic`: a shard is a range of document numbers."""

    names = tuple(CORPORA)
    start_unit = "document"

    def has_fields(self, source: str) -> bool:
        return source in PROBLEMS

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        each = max(1, sum(map(len, _sample(source, options))) // SAMPLED)
        step, end = max(1, shard_bytes // each), options.first + options.documents
        ranges = [(start, min(start + step, end)) for start in range(options.first, end, step)]
        return [Shard("builtin", source, start, stop, (stop - start) * each) for start, stop in ranges]

    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        return documents(shard.source, options.seed, shard.start, shard.stop - shard.start)

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        """With an answer, documents are made from the corpus's fields `question` and `answer`."""
        if options.answer is None:
            return super().pieces(shard, options)
        problem, numbers = PROBLEMS[shard.source], range(shard.start, shard.stop)
        return (document_of(problem(options.seed, at).row, options, f"{shard.source}, {at}") for at in numbers)

    def fingerprint(self, source: str, options: ReadOptions) -> dict[str, Any]:
        # The text changes when the generator does, so its first documents are hashed.
        sample = "\0".join(_sample(source, options))
        return {"corpus": source, "sample": hashlib.sha256(sample.encode()).hexdigest()}


def _sample(source: str, options: ReadOptions) -> list[str]:
    return [document(source, options.seed, options.first + number) for number in range(SAMPLED)]


@FORMATS.register("python")
class StandardLibrary(Format):
    """The interpreter's own standard library as Python text: on every machine, a document for each file."""

    names = ("python",)
    start_unit = "file"

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        return consecutive_shards("python", source, list(_files(options).values()), shard_bytes)

    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        for file in list(_files(options))[shard.start : shard.stop]:
            with tokenize.open(Path(sysconfig.get_path("stdlib"), file)) as opened:  # in the encoding that it declares
                yield opened.read()

    def fingerprint(self, source: str, options: ReadOptions) -> dict[str, Any]:
        files = list(_files(options).items())
        return {
            "python": sysconfig.get_python_version(),
            "size": sum(size for _, size in files),
            "files": hashlib.sha256(repr(files).encode()).hexdigest(),
        }


def _files(options: ReadOptions) -> dict[str, int]:
    """The names and sizes of as many files as the options say, from the first one on; empty ones are no documents."""
    folder = Path(sysconfig.get_path("stdlib"))
    sizes = {}
    for inside, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for file in (Path(inside, name) for name in names if name.endswith(".py")):
            sizes[file.relative_to(folder).as_posix()] = file.stat().st_size
    if not (files := [(name, size) for name, size in sorted(sizes.items()) if size]):
        what = "this Python has no source files of its standard library"
        raise BraidError(what, str(folder), "Name a folder of Python files.")
    return dict(files[options.first : options.first + options.documents])
