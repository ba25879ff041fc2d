"""The runs, reports and models in the folders that a server was started with, each under an id.

A request names ids alone: they are looked up in a table, and no path of a request reaches the file system. The folders
are looked through again every few seconds, so that new runs appear. Links are not followed: what is served lies in the
folders that were named.
"""

import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import unescape
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.models.folders import load_lineage
from braidlm.core.models.runs import RECIPE, is_model_folder
from braidlm.opening.names import StrPath, find_sources
from braidlm.serving.inspect.run_log import RunLog, read_part
from braidlm.serving.models import NotFound

LOOK_EVERY = 2.0
"""Seconds between two looks through the folders."""
DEPTH, MAX_ENTRIES = 6, 10_000
"""How deep folders are looked through, and how many entries of all of them."""
NOT_LOOKED_AT = {"states", "tensorboard", "wandb", "kept", "data"}
"""Folders of a run, an evaluation or a study that hold neither models nor reports."""
MAX_REPORT = 64 << 20
HEAD = 8192
"""Bytes of a page in which its title stands."""
IS_OURS = re.compile(r'<meta name="generator" content="Braid ')
TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)
ABOUT = re.compile(r'<meta name="description" content="(.*?)">', re.DOTALL)
LINK = re.compile(r'(<a\b[^>]*?\bhref=")([^"#?:]+\.html)(?=["#])')


@dataclass(frozen=True)
class FoundReport:
    """A page that a verb of ours wrote."""

    id: str
    name: str
    """Where it is, from the folder that was named."""
    path: Path
    title: str
    about: str
    changed: float


@dataclass
class FoundFolders:
    """What one look through the folders found."""

    runs: dict[str, RunLog] = field(default_factory=dict)
    reports: dict[str, FoundReport] = field(default_factory=dict)
    models: list[Path] = field(default_factory=list)


class ServedFolders:
    """The folders that were named when the server was started; safe to use from several threads."""

    def __init__(self, names: StrPath | Sequence[StrPath]):
        self.roots = list(dict.fromkeys(_roots([names] if isinstance(names, (str, Path)) else names)))
        self._lock = threading.Lock()
        self._found, self._looked = FoundFolders(), -LOOK_EVERY
        self._heads: dict[tuple[Path, int, int], tuple[str, str] | None] = {}
        self._lineages: dict[tuple[Path, int], tuple[str | None, dict[str, Any]]] = {}

    @property
    def found(self) -> FoundFolders:
        """What is there now, but for the last few seconds."""
        with self._lock:
            if time.monotonic() >= self._looked + LOOK_EVERY:
                self._found, self._looked = self._look(), time.monotonic()
            return self._found

    def run(self, id: str) -> RunLog:
        """A run by its id."""
        return _by_id("run", id, self.found.runs)

    def report(self, id: str) -> str:
        """The page of a report; its links to other reports of the folders lead to them."""
        report = _by_id("report", id, self.found.reports)
        ids = {each.path: each.id for each in self.found.reports.values()}

        def linked(match: re.Match[str]) -> str:
            target = Path(os.path.normpath(report.path.parent / unquote(match[2])))
            return f"{match[1]}/reports/{ids[target]}" if target in ids else match[0]

        try:
            page = read_part(report.path, 0, MAX_REPORT).data
        except OSError:
            raise NotFound(f"the report '{id}' was there a moment ago, and is not any more") from None
        return LINK.sub(linked, page.decode("utf-8", "replace"))

    def run_id(self, folder: Path | None) -> str | None:
        """The id of a run's folder, if it is in the folders."""
        found = folder and self.found.runs.get(_id_of(Path(os.path.realpath(folder))))
        return found.id if found else None

    def lineage_of(self, sha256: str) -> dict[str, Any] | None:
        """The lineage of a model in the folders, by the SHA-256 of its weights."""
        for folder in self.found.models:
            path = folder / "lineage.json"
            try:
                key = (path, os.lstat(path).st_mtime_ns)
                if key not in self._lineages:
                    lineage = load_lineage(folder) or {}
                    lineage.pop("tensors", None)  # what became of each takes the most memory, and no graph shows it
                    self._lineages[key] = (lineage.get("weights") or {}).get("sha256"), lineage
            except (OSError, BraidError):  # it was removed, or is not ours
                continue
            if self._lineages[key][0] == sha256:
                return self._lineages[key][1]
        return None

    def _look(self) -> FoundFolders:
        before, found, left = self._found, FoundFolders(), [MAX_ENTRIES]
        for root in self.roots:
            for path, status in _entries(root, DEPTH, left):
                # A name is text, whatever bytes it has.
                name = os.fsencode(Path(root.name) / path.relative_to(root)).decode("utf-8", "replace")
                if status is not None:
                    if report := self._report(path, status, name):
                        found.reports[report.id] = report
                elif (path / RECIPE).is_file():
                    id = _id_of(path)
                    found.runs[id] = before.runs.get(id) or RunLog(id, name, path)
                elif is_model_folder(path):
                    found.models.append(path)
        return found

    def _report(self, path: Path, status: os.stat_result, name: str) -> FoundReport | None:
        """The report that a file is, which is read again when it has changed."""
        key = (path, status.st_mtime_ns, status.st_size)
        if key not in self._heads:
            if len(self._heads) >= MAX_ENTRIES:
                self._heads.clear()
            self._heads[key] = _title(path, status.st_size)
        if (told := self._heads[key]) is None:
            return None
        return FoundReport(_id_of(path), name, path, *told, status.st_mtime_ns / 1e9)


def _by_id(kind: str, id: str, known: dict[str, Any]) -> Any:
    if id not in known:
        raise NotFound(f"there is no {kind} '{id[:100]}'.{did_you_mean(id[:100], known)}")
    return known[id]


def _roots(names: Sequence[StrPath]) -> Iterator[Path]:
    """The folders that names stand for, without links; a model of the Hub has no runs."""
    for name in names:
        path = Path(os.path.expanduser(name))
        try:
            found = [path] if path.is_dir() else find_sources(name)
        except BraidError:
            continue
        yield from (Path(os.path.realpath(folder)) for folder in found)


def _entries(folder: Path, depth: int, left: list[int]) -> Iterator[tuple[Path, os.stat_result | None]]:
    """A folder, the pages in it with their status and the folders below; at most `left[0]` entries are looked at."""
    yield folder, None
    if not depth or (depth < DEPTH and is_model_folder(folder)):
        return
    try:
        with os.scandir(folder) as inside:
            listed = sorted(islice(inside, max(0, left[0])), key=lambda entry: entry.name)
    except OSError:  # removed a moment ago, or not ours to read
        return
    left[0] -= len(listed)
    for entry in listed:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if entry.name.startswith("."):
            continue
        if stat.S_ISDIR(status.st_mode) and entry.name not in NOT_LOOKED_AT:
            yield from _entries(Path(entry.path), depth - 1, left)
        elif stat.S_ISREG(status.st_mode) and entry.name.endswith(".html"):
            yield Path(entry.path), status


def _title(path: Path, size: int) -> tuple[str, str] | None:
    if size > MAX_REPORT:
        return None
    try:
        head = read_part(path, 0, HEAD).data.decode("utf-8", "replace")
    except OSError:
        return None
    if not IS_OURS.search(head):
        return None
    title, about = TITLE.search(head), ABOUT.search(head)
    return (unescape(title[1]) if title else path.stem, unescape(about[1]) if about else "")


def _id_of(path: Path) -> str:
    """What a run or report is called in addresses: its name, and a hash of its path, which tells it from others."""
    name = f"{path.parent.name}-{path.stem}" if path.suffix == ".html" else path.name
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:60].strip(".-")
    return f"{name or 'unnamed'}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
