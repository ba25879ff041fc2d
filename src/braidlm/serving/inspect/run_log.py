"""A run as the page shows it: its curves and samples, read while they are written, and whether it is at work.

metrics.jsonl may grow at any time, end in half a line, be replaced by a shorter one (when a run goes on from an earlier
checkpoint), or be very large. It is read from where the last reading ended, a bounded part at a time.
"""

import contextlib
import math
import os
import stat
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from braidlm.core.errors import BraidError
from braidlm.core.files import is_locked
from braidlm.core.models.runs import METRICS, RECIPE
from braidlm.core.reading import parse_row, read_yaml
from braidlm.training.amounts import Amount
from braidlm.training.run_folder import budget_of

MAX_READ = 8 << 20
"""Bytes of a file of metrics that one request reads."""
MAX_LINE = 1 << 20
"""A longer line is none of ours."""
MAX_ROWS = 20_000
"""Records that are kept; of a run with more, every second one is left out, again and again."""
ROWS_AT_ONCE = 5_000
MAX_SAMPLES, MAX_SAMPLE = 200, 10_000
"""Samples that are kept, and characters of each."""
MAX_COLUMNS = 400
KINDS = ("train", "validation")
FIRST = ("step", "kind")
NOT_SHOWN = {"kind", "step", "usage", "sets", "epochs"}


class FilePart(NamedTuple):
    """Some bytes of a file, and which file it was."""

    data: bytes
    size: int
    """The whole file's."""
    inode: int


def read_part(path: Path, offset: int, size: int) -> FilePart:
    """At most `size` bytes of a plain file, from `offset`; an OSError for links, pipes and devices."""
    # A pipe would be waited for, and a link may lead anywhere; Windows has neither flag.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a plain file")
        file.seek(offset)
        return FilePart(file.read(size), status.st_size, status.st_ino)


@dataclass
class Curves:
    """The records of one file of metrics so far."""

    inode: int = -1
    offset: int = 0
    columns: list[str] = field(default_factory=lambda: list(FIRST))
    rows: list[tuple[int, list[Any]]] = field(default_factory=list)
    """Each with its number in the file; rows are as long as there were columns when they were read."""
    count: int = 0
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    last: dict[str, Any] = field(default_factory=dict)
    """The newest value of each column."""
    has_more: bool = False
    """Whether the file has complete lines that were not read yet."""
    skips_line: bool = False
    """Whether the reading is inside a line that is too long, the rest of which is left out."""


class RunLog:
    """One run's folder; safe to use from several threads."""

    def __init__(self, id: str, name: str, folder: Path):
        self.id, self.name, self.folder = id, name, folder
        self._lock = threading.Lock()
        self._curves = Curves()
        self._budget: tuple[tuple[int, int], Amount | None] | None = None
        """The budget, and which version of the recipe it is from."""
        self._generation = 0
        """Another number for each file that metrics.jsonl was."""

    @property
    def budget(self) -> Amount | None:
        """How much the recipe trains; None where it cannot be read."""
        try:
            status = os.stat(self.folder / RECIPE)
            if self._budget is None or self._budget[0] != (status.st_mtime_ns, status.st_size):
                self._budget = (status.st_mtime_ns, status.st_size), budget_of(read_yaml(self.folder / RECIPE))
            return self._budget[1]
        except (BraidError, OSError):
            return None

    @property
    def changed(self) -> float:
        """When something was last recorded."""
        for name in (METRICS, RECIPE):
            with contextlib.suppress(OSError):
                return os.lstat(self.folder / name).st_mtime
        return 0.0

    @property
    def state(self) -> str:
        """training, done, interrupted, or waiting: no record yet."""
        if is_locked(self.folder):
            return "training"
        with self._lock:
            curves = self._updated()
        if not curves.count:
            return "waiting"
        budget = self.budget
        reached = curves.last.get(budget.unit if budget and budget.unit != "steps" else "step", 0)
        return "done" if budget and isinstance(reached, int) and reached >= budget.count else "interrupted"

    def summary(self) -> dict[str, Any]:
        """What a list of runs shows."""
        budget = self.budget
        with self._lock:
            last = self._updated().last
        shown = {key: last.get(key) for key in ("step", "loss", "bits_per_byte", "tokens", "tokens_per_second")}
        told = {"id": self.id, "name": self.name, "state": self.state, "budget": budget and str(budget)}
        return told | shown | {"changed": self.changed}

    def metrics(self, after: str | None = None) -> dict[str, Any]:
        """The rows that follow an earlier answer, which said `next`."""
        state = self.state
        with self._lock:
            curves = self._updated()
            generation, _, number = (after or "").partition(".")
            known = generation == str(self._generation) and number.isdecimal() and len(number) < 16
            first = int(number) if known else 0
            rows = [row for row in curves.rows if row[0] >= first]
            shown = rows[:ROWS_AT_ONCE]
            upto = curves.count if len(shown) == len(rows) else shown[-1][0] + 1
            width = len(curves.columns)
            return {
                "columns": list(curves.columns),
                "rows": [[*row, *[None] * (width - len(row))] for _, row in shown],
                "next": f"{self._generation}.{upto}",
                "reset": after is not None and not known,
                "more": curves.has_more or len(shown) < len(rows),
                "state": state,
                "done": state == "done",
            }

    def samples(self) -> list[dict[str, Any]]:
        """What the model wrote during training, the newest last."""
        with self._lock:
            return list(self._updated().samples)

    def _updated(self) -> Curves:
        """The curves with what was written since the last reading."""
        curves = self._curves
        try:
            part = read_part(self.folder / METRICS, curves.offset, MAX_READ)
        except OSError:  # not there yet
            return curves
        if part.inode != curves.inode or part.size < curves.offset:
            if curves.inode != -1:
                self._generation += 1
            curves = self._curves = Curves(part.inode)
            part = read_part(self.folder / METRICS, 0, MAX_READ)
        end = len(part.data)
        if not curves.skips_line:
            end = part.data.rfind(b"\n") + 1
            curves.skips_line = not end and len(part.data) >= MAX_LINE  # its end may never come
            for line in part.data[:end].splitlines():
                _add(curves, line)
        elif b"\n" in part.data:
            curves.skips_line, end = False, part.data.index(b"\n") + 1
        curves.offset += len(part.data) if curves.skips_line else end
        curves.has_more = end > 0 and curves.offset < part.size
        if len(curves.rows) > MAX_ROWS:
            kept = [row for at, row in enumerate(curves.rows) if at % 2 or row[1][1] != "train"]
            curves.rows = kept[-MAX_ROWS:]
        return curves


def _add(curves: Curves, line: bytes) -> None:
    """A record of a line; what is none is left out."""
    try:
        record = parse_row(line.decode("utf-8", "replace"))
    except BraidError:
        return
    kind, step = record.get("kind"), record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return
    if kind == "sample":
        told = {key: str(record.get(key, ""))[:MAX_SAMPLE] for key in ("prompt", "text")}
        curves.samples.append({"step": step, **told})
    if kind not in KINDS:
        return
    values = {"step": step, "kind": kind} | dict(_numbers(record))
    for name in values:
        if name not in curves.columns and len(curves.columns) < MAX_COLUMNS:
            curves.columns.append(name)
    curves.rows.append((curves.count, [values.get(name) for name in curves.columns]))
    curves.count += 1
    curves.last |= values


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, float | int | None]]:
    """The numbers of a record under flat names; the texts of a validation have their own bits per byte."""
    for name, value in record.items():
        if name == "sets" and isinstance(value, dict):
            for text, score in value.items():
                if isinstance(score, dict):
                    yield from ((f"{key}/{text}", n) for key, n in _plain(score) if key not in ("tokens", "bytes"))
        elif isinstance(value, dict) and name not in NOT_SHOWN:
            yield from ((f"{name}/{key}", number) for key, number in _plain(value))
        elif name not in NOT_SHOWN:
            yield from _plain({name: value})


def _plain(values: dict[str, Any]) -> Iterator[tuple[str, float | int | None]]:
    """The numbers among some values; JSON over HTTP has no infinity."""
    for key, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield str(key), value if math.isfinite(value) else None
