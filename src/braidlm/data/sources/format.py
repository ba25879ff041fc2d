"""What every source has in common: how to read it, how it divides, and the list of formats."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.model.config.registry import Registry

FORMATS = Registry("source format")


@dataclass(frozen=True)
class Reading:
    """How documents are read out of a source; each format uses what concerns it."""

    fields: tuple[str, ...] = ("text",)
    """JSONL, parquet, Hub: the fields that make a document; a dot goes into an object."""
    joiner: str = "\n"
    """What stands between several fields."""
    separator: str = "blank"
    """Text files: documents end at `blank` lines, are `lines`, are a whole `file`, or are parted by any other text."""
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
    """A piece of a source that is read on its own, in order: bytes of a file, row groups, or document numbers."""

    kind: str
    """The format's name."""
    place: str
    """A path, or a name."""
    start: int = 0
    stop: int = -1
    """One past the end; -1 is to the end of the place."""
    size: int = 0
    """About how many bytes there are to read, for progress and sampling."""


class Format(ABC):
    """One kind of source. A new one is a file in this folder with a class under `@FORMATS.register`."""

    extensions: tuple[str, ...] = ()

    @abstractmethod
    def plan(self, place: str, reading: Reading, shard_bytes: int) -> list[Shard]:
        """The pieces of a place, in order, each of about `shard_bytes`."""

    @abstractmethod
    def documents(self, shard: Shard, reading: Reading) -> Iterator[str]:
        """The documents of one piece, in order."""

    def facts(self, place: str, reading: Reading) -> dict[str, Any]:
        """What changes when the text does: a new run with the same facts may go on with the work of an old one."""
        status = Path(place).stat()
        return {"place": place, "size": status.st_size, "changed": status.st_mtime_ns}


def missing(package: str, purpose: str) -> BraidError:
    """The error for an optional package that is not installed."""
    return BraidError(f"{purpose} needs the package '{package}'", todo="pip install 'braidlm[data]'")
