"""Which shards a source has. A shard can be read on its own, and shards have one fixed order.

A source is a file of a known format, a folder or glob of such files, a built-in corpus, the standard library
of Python, or a Hub data set.
"""

import codecs
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.addresses import files_at, is_address
from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.models.runs import HISTORY, RECIPE
from braidlm.core.reading import check_openable, explained_system_errors, given_path
from braidlm.data.sources.files import COMPRESSIONS, extension, open_bytes
from braidlm.data.sources.format import FORMATS, ReadOptions, Shard
from braidlm.model.config.registry import import_files

MIN_SHARD_BYTES, MAX_SHARD_BYTES, TARGET_SHARDS = 4 << 20, 64 << 20, 512

MADE = ((RECIPE, HISTORY), ("lineage.json",), ("data.json", "tokens.bin"))
"""A run, a model folder and a packed data set have these files."""

NO_TEXT = (".json", ".yaml", ".yml", ".html", ".htm", ".xml", ".svg", ".rtf", ".ps", ".pdf")
"""Extensions of files that may begin as text, in which a text is packed into something else."""
SEEN = 4096
"""Bytes that show whether a file of another extension holds text."""

import_files("braidlm.data.sources")


@dataclass(frozen=True)
class ShardPlan:
    """The shards of all sources in order, and fingerprints that change when the text does."""

    shards: list[Shard]
    fingerprints: list[dict[str, Any]]
    skipped: list[str]
    """Files in folders and globs of which the kind is not known."""

    @property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards)


def plan_shards(
    sources: str | Path | Sequence[str | Path], options: ReadOptions, shard_bytes: int | None = None
) -> ShardPlan:
    """Divide sources into shards; the same whatever the number of workers."""
    sources = [sources] if isinstance(sources, str | Path) else sources
    skipped: list[str] = []
    expanded = [pair for source in sources for pair in _expand(str(source), options, skipped)]
    if not expanded:
        raise BraidError("no source was given", todo="Name a file, a folder, an address, a corpus or `hub:NAME`.")
    fingerprints = [FORMATS[kind]().fingerprint(source, options) for kind, source in expanded]
    if shard_bytes is None:
        size = sum(fingerprint.get("size", 0) for fingerprint in fingerprints)
        shard_bytes = min(MAX_SHARD_BYTES, max(MIN_SHARD_BYTES, size // TARGET_SHARDS))
    shards = [shard for kind, source in expanded for shard in FORMATS[kind]().shards(source, options, shard_bytes)]
    if not shards:
        raise BraidError("there is no text in it", ", ".join(map(str, sources)), "The files are empty.")
    for shard in shards if options.answer is not None else []:
        if not shard.format.has_fields(shard.source):
            what = f"documents of this source have no fields, and the field '{options.answer}' is to be the answer"
            raise BraidError(what, shard.source, "Questions with answers are JSONL, parquet or Hub data sets.")
    return ShardPlan(shards, fingerprints, skipped)


def _expand(source: str, options: ReadOptions, skipped: list[str]) -> list[tuple[str, str]]:
    """The (format, source) pairs that a file, folder, glob or name stands for; `skipped` gets files of other kinds."""
    for kind in FORMATS:
        if (name := FORMATS[kind].named(source)) is not None:
            return [(kind, name)]
    if is_address(source):
        if not (files := files_at(source)):
            raise BraidError("there is nothing at this address", source, "Check the bucket and the name.")
        return _known_files(files, source, options, skipped)
    with explained_system_errors(source):
        pairs = _expand_path(source, options, skipped)
    for _, path in pairs:
        check_utf8(path)
    return pairs


def no_documents(where: str | None = None) -> BraidError:
    """The error for a source without text."""
    what = "there are no documents in it, only empty ones or none"
    return BraidError(what, where, "Check the source and its fields.")


def check_utf8(path: str) -> None:
    """Refuse a name that cannot be written into the JSON files of a data set."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise BraidError("the name of this file or folder is not UTF-8", ascii(path), "Rename it.") from None


def _expand_path(source: str, options: ReadOptions, skipped: list[str]) -> list[tuple[str, str]]:
    path = given_path(source).absolute()
    if path.is_dir():
        return _known_files([str(file) for file in sorted(_files_in(path))], source, options, skipped)
    if path.is_file():
        return _known_files([str(path)], source, options, skipped)
    if glob.has_magic(source):
        matches = sorted(glob.glob(str(path), recursive=True))
        return _known_files([file for file in matches if not os.path.isdir(file)], source, options, skipped)
    check_openable(path)
    names = [name for kind in FORMATS for name in FORMATS[kind].names]
    near = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    what = f"there is no such file, folder or corpus.{did_you_mean(path.name, [*near, *names]) if near else ''}"
    known = "files, folders, globs, addresses (s3://...), hub:NAME for a Hub data set"
    todo = f"Sources are {known}, and the corpora {', '.join(names)}."
    raise BraidError(what, source, todo)


def _files_in(folder: Path) -> Iterator[Path]:
    """The files of a folder, without hidden files and without runs, models and packed data (a run's `out` has some)."""
    for name, inside, files in os.walk(folder):
        inside[:] = [one for one in inside if not one.startswith(".") and not _is_made(Path(name, one))]
        yield from (Path(name, file) for file in files if not file.startswith("."))


def _is_made(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in MADE)


def _known_files(files: list[str], source: str, options: ReadOptions, skipped: list[str]) -> list[tuple[str, str]]:
    """The files whose format is known, each with it, or if there are none those that hold text; others are skipped."""
    kinds = _by_extension()
    known = [(kind, file) for file in files if (kind := kinds.get(extension(file)))]
    known = [(kind, file) for kind, file in known if FORMATS[kind].read_beside_others] or known
    known = known or [("text", file) for file in files if _holds_text(file, options.encoding)]
    skipped += sorted(set(files) - {file for _, file in known})
    if not known:
        seen = sorted({extension(file) or "(none)" for file in files})
        kinds_seen = f"only files of an unknown kind ({', '.join(seen[:8])})"
        what = kinds_seen if len(files) > 1 else f"unknown kind of file '{seen[0]}'" if files else "no file matches"
        raise BraidError(what, source, _known_formats())
    return known


def _holds_text(file: str, encoding: str) -> bool:
    """Whether a file begins as text does: a program, a log. JSON and markup hold text, and are none."""
    if extension(file) in NO_TEXT:
        return False
    with open_bytes(file) as opened:
        begin = opened.read(SEEN)
    try:
        return "\0" not in codecs.getincrementaldecoder(encoding)().decode(begin)
    except UnicodeError:
        return False


def _by_extension() -> dict[str, str]:
    return {suffix: kind for kind in FORMATS for suffix in FORMATS[kind].extensions}


def _known_formats() -> str:
    known = f"Braid reads {', '.join(_by_extension())}, and other files that begin as text, also with "
    return f"{known}{', '.join(COMPRESSIONS)}: convert the file."
