"""What every source has in common: options for reading, shards, and the registry of formats."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.model.config.registry import Registry

FORMATS = Registry("source format")


@dataclass(frozen=True)
class ReadOptions:
    """How documents are read from a source; each format uses the options that concern it."""

    fields: tuple[str, ...] = ("text",)
    """JSONL, parquet, Hub: the fields that make a document; a dot goes into an object."""
    joiner: str = "\n"
    """The text between several fields."""
    separator: str = "blank"
    """Text files: documents are separated by `blank` lines or any other text, are `lines`, or a whole `file`."""
    encoding: str = "utf-8"
    errors: str = "strict"
    """What to do with bytes that are not text: strict (stop), replace or ignore."""
    documents: int = 10_000
    """Built-in corpora: how many documents."""
    first: int = 0
    """Built-in corpora: the number of the first document, so that a second data set can begin where one ended."""
    seed: int = 0
    """Built-in corpora: which endless corpus."""
    split: str = "train"
    """Hub: which split."""
    subset: str | None = None
    """Hub: which configuration of the data set, where it has several."""


@dataclass(frozen=True)
class Shard:
    """A part of a source that can be read on its own: bytes of a file, row groups, or document numbers."""

    kind: str
    """The format's name."""
    source: str
    """A path, or the name of a corpus or Hub data set."""
    start: int = 0
    stop: int = -1
    """One past the end; -1 is the end of the source."""
    size: int = 0
    """About how many bytes there are to read, for progress and sampling."""


class Format(ABC):
    """One kind of source. A new one is a file in this folder with a class under `@FORMATS.register`."""

    extensions: tuple[str, ...] = ()

    @abstractmethod
    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        """The shards of a source, in order, each of about `shard_bytes`."""

    @abstractmethod
    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        """The documents of one shard, in order."""

    def fingerprint(self, source: str, options: ReadOptions) -> dict[str, Any]:
        """Values that change when the text does; a run with the same fingerprint may continue the work of another."""
        status = Path(source).stat()
        return {"place": source, "size": status.st_size, "changed": status.st_mtime_ns}


def missing_package(package: str, purpose: str) -> BraidError:
    """The error for an optional package that is not installed."""
    return BraidError(f"{purpose} needs the package '{package}'", todo="pip install 'braidlm[data]'")
