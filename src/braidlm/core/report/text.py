"""Reports as Markdown and in the terminal, and tables as CSV."""

import csv
import io
import re
from typing import Any

from rich.markup import escape

from braidlm.core import console
from braidlm.core.report.report import (
    Code,
    Facts,
    Heading,
    Links,
    Mark,
    Part,
    Picture,
    Quote,
    Report,
    Strong,
    Table,
    Text,
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


def _markdown(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f"{'#' * level} {plain(text)}"
        case Text():
            return "\n\n".join(map(plain, part.paragraphs))
        case Facts(values):
            return "\n".join(f"- {plain(name)}: {plain(cell_text(value))}" for name, value in values.items())
        case Table():
            return _markdown_table(part)
        case Picture(_, caption, name) if name:
            return f"![{plain(caption)}]({name}.png)"
        case Quote():
            return _markdown_quote(part)
        case Code(text, summary) if not summary:
            return f"```\n{text.strip(chr(10))}\n```"
        case Links(files):
            return "\n".join(f"- [{plain(name)}]({file.replace(' ', '%20')})" for name, file in files.items())
    return ""


def _markdown_table(table: Table) -> str:
    lines = [list(map(plain, table.columns)), ["---"] * len(table.columns)]
    lines += [[_markdown_cell(value) for value in row] for row in table.rows]
    shown = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{plain(table.caption)}\n\n{shown}" if table.caption else shown


def _markdown_cell(value: Any) -> str:
    text = plain(cell_text(value)).replace("\n", " ")
    return f"**{text}**" if isinstance(value, Strong) else text


def _markdown_quote(quote: Quote) -> str:
    text = SPECIAL.sub(r"\\\g<0>", quote.prompt + quote.text).replace("`", r"\`")
    lines = "\n".join(f"> {line}".rstrip() + "  " for line in text.split("\n"))
    return "\n\n".join(filter(None, [f"**{plain(quote.who)}**" if quote.who else "", lines, plain(quote.note)]))


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
        case Facts(values):
            for name, value in values.items():
                console.show(f"{name}: {cell_text(value)}")
        case Table():
            rows = [[_terminal_cell(value) for value in row] for row in part.rows]
            columns = [escape(name) for name in part.columns]
            console.table(columns, rows, part.title or part.caption or None, part.keep or None)
        case Quote(text, who, prompt, note):
            lines = [f"  {who}:"] if who else []
            lines += [f"    {line}".rstrip() for line in (prompt + text).split("\n")]
            console.show("\n".join([*lines, *([f"    {note}"] if note else []), ""]))


def _terminal_cell(value: Any) -> str:
    text = escape(cell_text(value))
    return f"[bold]{text} *[/bold]" if isinstance(value, Strong) else text
