"""The files of a report, and the folder that they are written into."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, write_bytes, write_json, write_text
from braidlm.core.report.drawing import draw, load_matplotlib, to_png
from braidlm.core.report.rendering import csv_text, html, markdown, table_markdown
from braidlm.core.report.report import Picture, Report, Table

SUFFIXES = (".html", ".md", ".csv", ".json", ".png")


def write(
    report: Report, out: Path | str, name: str, formats: tuple[str, ...] = ("html",), fresh: bool = False
) -> Path:
    """Write a report as NAME.html, NAME.md or both, with its charts, tables and data beside it; return the first.

    Charts and tables have the names that they are given; data is JSON. With `fresh` the folder appears in one step, in
    place of an older one.
    """
    pictures = [part for part in report.parts if isinstance(part, Picture)]
    figures = [draw(picture.chart) for picture in pictures]
    with atomic_folder(out, replace=True) if fresh else contextlib.nullcontext(Path(out)) as folder:
        for picture, figure in zip(pictures, figures, strict=True):
            if picture.name:
                write_bytes(folder / f"{picture.name}.png", to_png(figure))
        shown = [part for part in report.parts if isinstance(part, Table) and part.name]
        for table in [*shown, *report.tables]:
            write_text(folder / f"{table.name}.csv", csv_text(table))
        for table in shown:
            write_text(folder / f"{table.name}.md", table_markdown(table))
        for file, data in report.data.items():
            write_json(folder / f"{file}.json", data)
        if "md" in formats:
            write_text(folder / f"{name}.md", markdown(report))
        if "html" in formats:
            write_text(folder / f"{name}.html", html(report, figures))
    return Path(out) / f"{name}.{formats[0]}"


FORMATS: dict[str, Callable[[Report], str]] = {
    ".md": markdown,
    ".html": html,
    ".csv": lambda report: csv_text(report.tables[0]),
}


def write_file(report: Report, out: Path | str) -> None:
    """Write a report, or as CSV its first table for programs, as one file in the format of its extension."""
    write_text(out, FORMATS[Path(out).suffix](report))


def check_file(out: Path | str) -> None:
    """Raise an error, before any long work, if this file could not be written."""
    if Path(out).suffix not in FORMATS:
        raise BraidError(f"a report ends in {', '.join(FORMATS)}; its extension is its format", str(out))
    if Path(out).is_dir():
        raise BraidError("this is a folder", str(out), "Give the name of a file in it.")


def check_drawing() -> None:
    """Raise an error, before any long work, if matplotlib is missing."""
    load_matplotlib()


def check_out(out: Path | str, verb: str, *names: str, fresh: bool = False, draws: bool = True) -> None:
    """Raise an error, before any long work, if `out` is not a folder of `verb`, or charts cannot be drawn.

    A folder of the verb has a file or folder of one of these names; one that is replaced (`fresh`) holds nothing but
    files of reports.
    """
    if draws:
        check_drawing()
    out = Path(out)
    if not out.exists():
        return
    inside = list(out.iterdir()) if out.is_dir() else []
    known = not inside or any(path.name in names for path in inside)
    if fresh:
        known = known and all(path.suffix in SUFFIXES for path in inside)
    if not (out.is_dir() and known):
        raise BraidError(f"this exists already and is not a report of `{verb}`", str(out), "Choose another folder.")
