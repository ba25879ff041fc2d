"""Data sets on the Hugging Face Hub, streamed: `hub:NAME`, `hub:NAME:SPLIT`, `hub:NAME@REVISION`.

NAME may also be a local folder in the Hub's layout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.reading import given_path
from braidlm.data.sources.format import (
    FORMATS,
    Piece,
    ReadOptions,
    RowFormat,
    Shard,
    check_columns,
    document_of,
    missing_package,
)

PREFIX = "hub:"
ASSUMED_FILE_BYTES = 32 << 20
"""The assumed size of a data set's file, for progress; the Hub does not give it before the file is read."""


@FORMATS.register("hub")
class Hub(RowFormat):
    """A Hub data set; a shard is one of its files."""

    start_unit = "file"

    @classmethod
    def named(cls, source: str) -> str | None:
        return source.removeprefix(PREFIX) if source.startswith(PREFIX) else None

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        data = _open(source, options)
        if data.column_names:
            check_columns(data.column_names, options, PREFIX + source)
        return [Shard("hub", source, index, index + 1, ASSUMED_FILE_BYTES) for index in range(data.num_shards)]

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        data = _open(shard.source, options)
        rows = data.shard(num_shards=data.num_shards, index=shard.start) if data.num_shards > 1 else data
        for number, row in enumerate(rows):
            yield document_of(row, options, f"{PREFIX}{shard.source}, file {shard.start + 1}, row {number + 1}")

    def fingerprint(self, source: str, options: ReadOptions) -> dict[str, Any]:
        return {"hub": source}


def _open(source: str, options: ReadOptions) -> Any:
    name, _, split = source.partition(":")
    name, _, revision = name.partition("@")
    version = {"split": split or options.split, "revision": revision or None}
    with hub_library(PREFIX + source, "Check the name, `--split` and `--subset`.") as library:
        return library.load_dataset(hub_name(name), options.subset, **version, streaming=True)


def hub_name(name: str) -> str:
    """The name of a data set for `datasets`: a local folder by its expanded path."""
    folder = given_path(name)
    return str(folder) if folder.is_dir() else name


@contextmanager
def hub_library(where: str, todo: str) -> Iterator[Any]:
    """The package `datasets`; its errors become BraidErrors, which name the splits and configurations that exist."""
    try:
        import datasets
    except ImportError:
        raise missing_package("datasets", "reading a Hub data set") from None
    try:
        yield datasets
    except ConnectionError as error:
        raise BraidError(
            f"the Hub cannot be reached ({type(error).__name__})",
            where,
            "Check the connection, or download the data set's files and give their folder.",
        ) from None
    except (ValueError, OSError) as error:
        raise BraidError(f"this data set cannot be opened: {str(error).strip().splitlines()[0]}", where, todo) from None
