"""Reports as Markdown and in the terminal, and tables as CSV."""

import csv
import io
import re
from functools import singledispatch
from typing import Any

from rich.markup import escape

from braidlm.core import console
from braidlm.core.report.report import (
    Code,
    Facts,
    Heading,
    Links,
    Mark,
    Picture,
    Quote,
    Report,
    Strong,
    Table,
    Text,
    Tokens,
    cell_text,
)

SPECIAL = re.compile(r"[\\*\[\]<>|]|~~|(?<!\w)_|_(?!\w)|^#", re.MULTILINE)
"""What Markdown would read as markup."""
CODE = re.compile(r"(`[^`\n]+`)")


def csv_text(table: Table) -> str:
    """Comma-separated values with every digit: nothing for None, and `true` or `false`."""
    table = table.data or table
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([_csv_cell(value) for value in row] for row in table.rows)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    if isinstance(value, Mark):
        return value.text
    return str(value).lower() if isinstance(value, bool) else value


def markdown(report: Report) -> str:
    """The report without what only a page can show: tokens in colours, and collapsed listings."""
    head = [f"# {plain(report.title)}", plain(report.subtitle), plain(report.verdict)]
    parts = [*head, *(_markdown(part) for part in report.parts)]
    return "\n\n".join(filter(None, parts)) + "\n"


def table_markdown(table: Table) -> str:
    """A table alone, under its title."""
    return markdown(Report(table.title, parts=[Table(table.columns, table.rows)]))


def plain(text: str) -> str:
    """Text with Markdown's special characters escaped, but for `code`."""
    pieces = CODE.split(text)
    return "".join(piece if at % 2 else SPECIAL.sub(r"\\\g<0>", piece) for at, piece in enumerate(pieces))


@singledispatch
def _markdown(part: Any) -> str:
    raise TypeError(f"{type(part).__name__} is no part of a report")


@_markdown.register
def _(part: Heading) -> str:
    return f"{'#' * part.level} {plain(part.text)}"


@_markdown.register
def _(part: Text) -> str:
    return "\n\n".join(map(plain, part.paragraphs))


@_markdown.register
def _(part: Facts) -> str:
    return "\n".join(f"- {plain(name)}: {plain(cell_text(value))}" for name, value in part.values.items())


@_markdown.register
def _(part: Table) -> str:
    lines = [_line(list(map(plain, part.columns))), _line(["---"] * len(part.columns))]
    lines += [_line([_markdown_cell(value) for value in row]) for row in part.rows]
    return "\n".join([*([f"{plain(part.caption)}\n"] if part.caption else []), *lines])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(value: Any) -> str:
    text = plain(cell_text(value)).replace("\n", " ")
    return f"**{text}**" if isinstance(value, Strong) else text


@_markdown.register
def _(part: Picture) -> str:
    return f"![{plain(part.caption)}]({part.name}.png)" if part.name else ""


@_markdown.register
def _(part: Quote) -> str:
    text = SPECIAL.sub(r"\\\g<0>", part.prompt + part.text).replace("`", r"\`")
    lines = [f"> {line}".rstrip() + "  " for line in text.split("\n")]
    parts = [f"**{plain(part.who)}**" if part.who else "", "\n".join(lines), plain(part.note)]
    return "\n\n".join(filter(None, parts))


@_markdown.register
def _(part: Tokens) -> str:
    return ""


@_markdown.register
def _(part: Code) -> str:
    return "" if part.summary else f"```\n{part.text.strip(chr(10))}\n```"


@_markdown.register
def _(part: Links) -> str:
    return "\n".join(f"- [{plain(name)}]({file.replace(' ', '%20')})" for name, file in part.files.items())


def show_report(report: Report | Table) -> None:
    """Print the verdict, the texts and the tables of a report, or one table, in the terminal."""
    if isinstance(report, Table):
        report = Report("", parts=[report])
    for number, part in enumerate([*([Text(report.verdict)] if report.verdict else []), *report.parts]):
        if number and isinstance(part, Heading):
            console.show("")
        _show(part)


@singledispatch
def _show(part: Any) -> None:
    """Pictures, tokens, listings and links have no form in the terminal."""


@_show.register
def _(part: Heading) -> None:
    console.show(part.text.replace("`", ""))


@_show.register
def _(part: Text) -> None:
    console.show(part.text.replace("`", ""))


@_show.register
def _(part: Facts) -> None:
    for name, value in part.values.items():
        console.show(f"{name}: {cell_text(value)}")


@_show.register
def _(part: Table) -> None:
    rows = [[_terminal_cell(value) for value in row] for row in part.rows]
    console.table([escape(name) for name in part.columns], rows, part.title or part.caption or None, part.keep or None)


def _terminal_cell(value: Any) -> str:
    text = escape(cell_text(value))
    return f"[bold]{text} *[/bold]" if isinstance(value, Strong) else text


@_show.register
def _(part: Quote) -> None:
    if part.who:
        console.show(f"  {part.who}:")
    for line in (part.prompt + part.text).split("\n"):
        console.show(f"    {line}".rstrip())
    if part.note:
        console.show(f"    {part.note}")
    console.show("")
