"""Where text comes from. A source becomes pieces (shards) that can be read apart, in one fixed order.

Files of any format here, folders and globs of them, a built-in corpus, or a Hub data set. Nothing is held in memory.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.data.corpora.builtin import CORPORA
from braidlm.data.sources.format import FORMATS, Format, Reading, Shard
from braidlm.data.sources.hub import PREFIX
from braidlm.data.sources.streams import COMPRESSIONS, extension
from braidlm.model.config.registry import import_files

__all__ = ["FORMATS", "Format", "Plan", "Reading", "Shard", "documents", "plan"]

SMALLEST_SHARD, LARGEST_SHARD, USUAL_SHARDS = 4 << 20, 64 << 20, 512

import_files(__name__)


@dataclass(frozen=True)
class Plan:
    """All pieces of all sources in order, and the facts that change when the text does."""

    shards: list[Shard]
    facts: list[dict[str, Any]]

    @property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards)


def plan(sources: Sequence[str | Path], reading: Reading, shard_bytes: int | None = None) -> Plan:
    """Find the places that sources mean and divide them; the same whatever the number of workers."""
    places = [place for source in sources for place in _places(str(source))]
    if not places:
        raise BraidError("no source was given", todo="Name a file, a folder, a corpus or `hub:NAME`.")
    facts = [FORMATS[kind]().facts(place, reading) for kind, place in places]
    if shard_bytes is None:
        known = sum(fact.get("size", 0) for fact in facts)
        shard_bytes = min(LARGEST_SHARD, max(SMALLEST_SHARD, known // USUAL_SHARDS))
    shards = [shard for kind, place in places for shard in FORMATS[kind]().plan(place, reading, shard_bytes)]
    if not shards:
        raise BraidError("there is no text in it", ", ".join(map(str, sources)), "The files are empty.")
    return Plan(shards, facts)


def documents(shard: Shard, reading: Reading) -> Iterator[str]:
    """The documents of a piece, in order."""
    return FORMATS[shard.kind]().documents(shard, reading)


def _places(source: str) -> list[tuple[str, str]]:
    """The (format, place) pairs that a source means."""
    if source.startswith(PREFIX):
        return [("hub", source.removeprefix(PREFIX))]
    if source in CORPORA:
        return [("builtin", source)]
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
        return _known(inside, source)
    if path.is_file():
        return [(_format(path), str(path))]
    if glob.has_magic(source):
        return _known([Path(file) for file in sorted(glob.glob(str(path), recursive=True))], source)
    near = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    raise BraidError(
        f"there is no such file, folder or corpus.{did_you_mean(path.name, [*near, *CORPORA]) if near else ''}",
        source,
        f"Sources are files, folders, globs, {PREFIX}NAME for a Hub data set, and the corpora {', '.join(CORPORA)}.",
    )


def _known(files: list[Path], source: str) -> list[tuple[str, str]]:
    """The files of a folder or glob whose format is known; the others are let be."""
    known = [(kind, str(file)) for file in files if file.is_file() and (kind := _by_extension().get(extension(file)))]
    if not known:
        seen = sorted({extension(file) or "(none)" for file in files})
        what = f"only files of an unknown kind ({', '.join(seen[:8])})" if files else "no file matches"
        raise BraidError(what, source, _kinds())
    return known


def _format(path: Path) -> str:
    kind = _by_extension().get(extension(path))
    if kind is None:
        raise BraidError(f"unknown kind of file '{path.suffix or path.name}'", str(path), _kinds())
    return kind


def _by_extension() -> dict[str, str]:
    return {suffix: kind for kind in FORMATS for suffix in FORMATS[kind].extensions}


def _kinds() -> str:
    return f"Braid reads {', '.join(_by_extension())}, also with {', '.join(COMPRESSIONS)}: rename or convert the file."


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
