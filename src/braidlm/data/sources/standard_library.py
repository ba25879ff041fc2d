"""The interpreter's own standard library as Python text: on every machine, a document for each file."""

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.sources.format import FORMATS, Format, ReadOptions, Shard

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Other packages, and tests, which not every installation has."""


@FORMATS.register("python")
class StandardLibrary(Format):
    """`python`: a shard is a range of files in the order of their names."""

    names = ("python",)
    start_unit = "file"

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        files = _files(options)
        ends = list(accumulate(file.stat().st_size for file in files))
        shards, start = [], 0
        for number, end in enumerate(ends, 1):
            begin = ends[start - 1] if start else 0
            if end - begin >= shard_bytes or number == len(ends):
                shards.append(Shard("python", source, start, number, end - begin))
                start = number
        return shards

    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        return (_text(file) for file in _files(options)[shard.start : shard.stop])

    def fingerprint(self, source: str, options: ReadOptions) -> dict[str, Any]:
        files = [(str(file.relative_to(_folder())), file.stat().st_size) for file in _files(options)]
        return {
            "python": sysconfig.get_python_version(),
            "size": sum(size for _, size in files),
            "files": hashlib.sha256(repr(files).encode()).hexdigest(),
        }


def _folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _files(options: ReadOptions) -> list[Path]:
    """As many files as the options say, from the first one on; empty ones are no documents."""
    folder = _folder()
    files = []
    for inside, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        files += [file for name in names if (file := Path(inside, name)).suffix == ".py" and file.stat().st_size]
    files.sort(key=lambda file: file.relative_to(folder).as_posix())
    if not files:
        raise BraidError(
            "this Python has no source files of its standard library", str(folder), "Name a folder of Python files."
        )
    return files[options.first : options.first + options.documents]


def _text(file: Path) -> str:
    """The text of a source file, in the encoding that it declares."""
    with tokenize.open(file) as opened:
        return opened.read()
