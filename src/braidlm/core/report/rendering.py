"""Reports as Markdown and in the terminal, tables as CSV, and the files and folders that hold them."""

import contextlib
import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, write_json, write_text
from braidlm.core.report import report as report_parts
from braidlm.core.report.chart_data import chart_table
from braidlm.core.report.page import html
from braidlm.core.report.report import Heading, Mark, Part, Report, Strong, Table, Text, cell_text

SPECIAL = re.compile(r"[\\*\[\]<>|]|~~|(?<!\w)_|_(?!\w)|^#", re.MULTILINE)
"""What Markdown would read as markup."""
CODE = re.compile(r"(`[^`\n]+`)")


def csv_text(table: Table) -> str:
    """Comma-separated values with every digit: nothing for None, and `true` or `false`."""
    table = table.data or table
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        texts = [value.text if isinstance(value, Mark) else value for value in row]
        writer.writerow([str(value).lower() if isinstance(value, bool) else value for value in texts])
    return text.getvalue()


def markdown(report: Report) -> str:
    """The report without what only a page can show: tokens in colours, and collapsed listings."""
    head = [f"# {plain(report.title)}", plain(report.subtitle), plain(report.verdict)]
    parts = [*head, *(part_markdown(part) for part in report.parts)]
    return "\n\n".join(filter(None, parts)) + "\n"


def table_markdown(table: Table) -> str:
    """A table alone, under its title."""
    return markdown(Report(table.title, parts=[Table(table.columns, table.rows)]))


def plain(text: str) -> str:
    """Text with Markdown's special characters escaped, but for `code`."""
    pieces = CODE.split(text)
    return "".join(piece if at % 2 else SPECIAL.sub(r"\\\g<0>", piece) for at, piece in enumerate(pieces))


def _cell(value: Any) -> str:
    text = plain(cell_text(value)).replace("\n", " ")
    return f"**{text}**" if isinstance(value, Strong) else text


def part_markdown(part: Part) -> str:
    """One part of a report, such as a table."""
    match part:
        case Heading(text, level):
            return f"{'#' * level} {plain(text)}"
        case Text():
            return "\n\n".join(map(plain, part.paragraphs))
        case report_parts.Facts(values):
            return "\n".join(f"- {plain(name)}: {plain(cell_text(value))}" for name, value in values.items())
        case Table():
            lines = [list(map(plain, part.columns)), ["---"] * len(part.columns)]
            lines += [list(map(_cell, row)) for row in part.rows]
            table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
            return f"{plain(part.caption)}\n\n{table}" if part.caption else table
        case report_parts.Picture(chart, caption):
            return "\n\n".join(filter(None, [plain(caption), part_markdown(chart_table(chart))]))
        case report_parts.Quote(text, who, prompt, note):
            quoted = SPECIAL.sub(r"\\\g<0>", prompt + text).replace("`", r"\`").split("\n")
            said = "\n".join(f"> {line}".rstrip() + "  " for line in quoted)
            return "\n\n".join(filter(None, [f"**{plain(who)}**" if who else "", said, plain(note)]))
        case report_parts.Code(text, summary) if not summary:
            return f"```\n{text.strip(chr(10))}\n```"
        case report_parts.Links(files):
            return "\n".join(f"- [{plain(name)}]({file.replace(' ', '%20')})" for name, file in files.items())
    return ""


def show_report(report: Report | Table) -> None:
    """Print the verdict, the texts and the tables of a report, or one table, in the terminal."""
    if isinstance(report, Table):
        report = Report("", parts=[report])
    for number, part in enumerate([*([Text(report.verdict)] if report.verdict else []), *report.parts]):
        if number and isinstance(part, Heading):
            console.show("")
        _show(part)


def _show(part: Part) -> None:
    """Pictures, tokens, listings and links have no form in the terminal."""
    match part:
        case Heading(text) | Text(text):
            console.show(text.replace("`", ""))
        case report_parts.Facts(values):
            for name, value in values.items():
                console.show(f"{name}: {cell_text(value)}")
        case Table():
            rows = [list(map(_terminal_cell, row)) for row in part.rows]
            console.table(part.columns, rows, part.title or part.caption or None, part.keep or None)
        case report_parts.Quote(text, who, prompt, note):
            lines = [f"  {who}:"] if who else []
            lines += [f"    {line}".rstrip() for line in (prompt + text).split("\n")]
            console.show("\n".join([*lines, *([f"    {note}"] if note else []), ""]))


def _terminal_cell(value: Any) -> Any:
    text = cell_text(value)
    return console.styled(f"{text} *", "bold") if isinstance(value, Strong) else text


SUFFIXES = (".html", ".md", ".csv", ".json", ".png")  # older reports have their charts as PNG files


def write(
    report: Report, out: Path | str, name: str, formats: tuple[str, ...] = ("html",), fresh: bool = False
) -> Path:
    """Write a report as NAME.html, NAME.md or both, with its tables and data beside it; return the first.

    Tables have the names that they are given; data is JSON. With `fresh` the folder appears in one step, in place of an
    older one.
    """
    with atomic_folder(out, replace=True) if fresh else contextlib.nullcontext(Path(out)) as folder:
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
            write_text(folder / f"{name}.html", html(report))
    return Path(out) / f"{name}.{formats[0]}"


FORMATS: dict[str, Callable[[Report], str]] = {
    ".md": markdown,
    ".html": html,
    ".csv": lambda report: csv_text(report.tables[0]),
}
"""How a report is written as one file, by the extension of the file; as CSV, its first table for programs."""


def check_file(out: Path | str) -> None:
    """Raise an error, before any long work, if this file could not be written."""
    if Path(out).suffix not in FORMATS:
        raise BraidError(f"a report ends in {', '.join(FORMATS)}; its extension is its format", str(out))
    if Path(out).is_dir():
        raise BraidError("this is a folder", str(out), "Give the name of a file in it.")


def check_out(out: Path | str, verb: str, *names: str, fresh: bool = False) -> None:
    """Raise an error, before any long work, if `out` is not a folder of `verb`.

    A folder of the verb has a file or folder of one of these names; one that is replaced (`fresh`) holds nothing but
    files of reports.
    """
    out = Path(out)
    if not out.exists():
        return
    inside = list(out.iterdir()) if out.is_dir() else []
    known = not inside or any(path.name in names for path in inside)
    if fresh:
        known = known and all(path.suffix in SUFFIXES for path in inside)
    if not (out.is_dir() and known):
        raise BraidError(f"this exists already and is not a report of `{verb}`", str(out), "Choose another folder.")
