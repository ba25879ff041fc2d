"""Output in the terminal: lines, tables, progress. Plain lines where there is no terminal.

A verb shows its result twice: for people with `show` and `table`, for programs with `show_json`. Which of the two is
printed, `json_output` decides.
"""

import contextlib
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


def _make_console(stderr: bool = False) -> Console:
    """What prints text as it is: names and texts of users are no markup, and `:fire:` is no picture."""
    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)


_console = _make_console()
_quiet = False
_verbose = False
_document: TextIO | None = None
"""Where the result for programs goes; None where it is for people."""
_COMMANDS = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _COMMANDS}
"""How characters are shown that would move a terminal's cursor, change its colours or turn the direction of text."""
JSON_ESCAPES = {code: f"\\u{code:04x}" for code in _COMMANDS}
PLAIN_INTERVAL = 10.0
"""Seconds between progress lines where there is no terminal."""


def set_quiet(quiet: bool) -> None:
    """With quiet, only results and errors are shown."""
    global _quiet
    _quiet = quiet


def set_verbose(verbose: bool) -> None:
    """With verbose, the details of plans are shown."""
    global _verbose
    _verbose = verbose


def is_quiet() -> bool:
    """Whether only results and errors are shown."""
    return _quiet


@contextlib.contextmanager
def json_output(wanted: bool) -> Iterator[None]:
    """With --json, standard output gets one JSON document and nothing else: messages go to standard error."""
    global _document
    if not wanted:
        yield
        return
    _document = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):  # also for what libraries print
            yield
    finally:
        _document = None


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Say nothing about the work in the block; results, warnings and errors are shown."""
    before = _quiet
    set_quiet(True)
    try:
        yield
    finally:
        set_quiet(before)


def print_any_name() -> None:
    """Let a file name that is not UTF-8 be printed, with escapes for its bytes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(message: str) -> None:
    """Print a line about the work in progress, unless quiet."""
    if not _quiet:
        _console.print(_shown(message, _console))


def _shown(text: str, console: Console) -> str:
    """A text for a terminal, where control characters are shown as escapes; for a pipe as it is."""
    return text.translate(ESCAPES) if console.is_terminal else text


def say_plan(summary: Iterable[str], details: Iterable[str], dry_run: bool) -> None:
    """Print a plan: the summary, then its details where --verbose or a dry run, whose result it is, asks for them."""
    for line in [*summary, *(details if dry_run or _verbose else ())]:
        (show if dry_run else say)(line)


def write(text: str) -> None:
    """Print a piece of a result, even when quiet; never wrapped, so that it can be piped."""
    if _document is None:
        _console.file.write(_shown(text, _console))
        _console.file.flush()


def show(message: str) -> None:
    """Print a line of a result, as `write` does."""
    write(message + "\n")


def show_json(facts: Any) -> None:
    """Print a verb's result for programs, if --json asks for it; numbers that JSON does not have are null."""
    if _document is not None:
        text = json.dumps(plain_data(facts), ensure_ascii=False, indent=2, default=str) + "\n"
        _document.write(text.translate(JSON_ESCAPES) if _document.isatty() else text)
        _document.flush()


def plain_data(value: Any) -> Any:
    """Lists and dictionaries as JSON has them: a number that is not finite is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain_data(one) for key, one in value.items()}
    return [plain_data(one) for one in value] if isinstance(value, (list, tuple)) else value


def warn(message: str) -> None:
    """Print a warning on standard error."""
    stream = _make_console(stderr=True)
    stream.print(_shown(f"warning: {message}", stream), style="yellow")


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None, keep: int | None = None
) -> None:
    """Print a table of results; columns of numbers are right-aligned, and a cell may be `styled`.

    With `keep`, columns that do not fit the terminal go into further tables, which repeat the first `keep`.
    """
    if _document is not None:
        return
    head, body = list(map(_cell, columns)), [list(map(_cell, row)) for row in rows]
    if title is not None:
        _console.print(styled(title, "bold"), soft_wrap=True)
    for number, part in enumerate(_split_columns(head, body, keep)):
        if number:
            show("")
        grid = Table(header_style="bold", box=None, pad_edge=False)
        for at in part:
            numeric = body and all(_is_number(row[at].plain) for row in body)
            grid.add_column(head[at], justify="right" if numeric else "left", overflow="fold")
        for row in body:
            grid.add_row(*(row[at] for at in part))
        _console.print(grid, soft_wrap=False)


def _cell(value: Any) -> Text:
    if isinstance(value, Text):
        return value
    return styled(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value), "")


def _split_columns(columns: Sequence[Text], body: Sequence[Sequence[Text]], keep: int | None) -> list[list[int]]:
    if not keep:
        return [list(range(len(columns)))]
    gap = 2
    widths = [max(cell.cell_len for cell in column) + gap for column in zip(columns, *body, strict=True)]
    tables = [list(range(keep))]
    for at in range(keep, len(columns)):
        if len(tables[-1]) > keep and sum(widths[one] for one in [*tables[-1], at]) - gap > _console.width:
            tables.append(list(range(keep)))
        tables[-1].append(at)
    return tables


@contextlib.contextmanager
def progress(
    label: str, total: float | None, unit: str = "", start: float = 0.0
) -> Iterator[Callable[[float, str], None]]:
    """Show progress over `total` units: yields `advance(done, note)`, to be called with the amount done so far.

    `start` was done in an earlier run, so the estimate does not count it. A terminal gets a live bar; anything else a
    plain line every few seconds, and nothing when quiet.
    """
    if _quiet:
        yield lambda done, note="": None  # type: ignore[misc]
    elif _console.is_terminal:
        with Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=_console,
        ) as bar:
            task = bar.add_task(_shown(label, _console), total=total, completed=start, note="")  # type: ignore[arg-type]
            yield lambda done, note="": bar.update(task, completed=done, note=_shown(note, _console))  # type: ignore[misc]
    else:
        yield _plain_progress(label, total, unit, start)


def _plain_progress(label: str, total: float | None, unit: str, start: float = 0.0) -> Callable[[float, str], None]:
    started = last = time.monotonic()
    ended = False

    def advance(done: float, note: str = "") -> None:
        nonlocal last, ended
        now = time.monotonic()
        finished = total is not None and done >= total
        if ended or (now - last < PLAIN_INTERVAL and not finished):
            return
        last, ended = now, finished
        parts = [f"{label}: {count(done)}{f' of {count(total)}' if total else ''} {unit}".rstrip(), note]
        if total and start < done < total:
            parts.append(f"{duration((now - started) * (total - done) / (done - start))} left")
        say("  ".join(p for p in parts if p))

    return advance


def count(number: float) -> str:
    """1234567 as 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def size(amount: float) -> str:
    """1500000 bytes as 1.5 MB."""
    for unit in ("bytes", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.0f} GB" if amount >= 100 else f"{amount:.3g} GB"


def duration(seconds: float) -> str:
    """75 as 1m15s."""
    seconds = round(seconds)
    if seconds >= 48 * 3600:
        return f"{round(seconds / 86400)} days"
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s" if seconds >= 60 else f"{seconds}s"


def styled(text: str, style: str) -> Text:
    """A text in another style than the rest: `bold`, `dim`."""
    return Text(_shown(text, _console), style)


def error(lines: Sequence[str]) -> None:
    """Print an error on standard error."""
    stream = _make_console(stderr=True)
    stream.print(_shown(f"error: {lines[0]}", stream), style="bold red")
    for line in lines[1:]:
        stream.print(_shown(line, stream))


def _is_number(text: str) -> bool:
    stripped = text.replace(",", "").rstrip("%kMBTs×x")
    try:
        float(stripped)
    except ValueError:
        return stripped in ("", "-")
    return True
