"""Reports as HTML, as Markdown and in the terminal, tables as CSV, and the files and folders that hold them.

A page is one self-contained file: no network, no scripts, no fonts to fetch. Every text is escaped.
"""

import contextlib
import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as url_quoted

from rich import markup

from braidlm import __version__
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, write_bytes, write_json, write_text
from braidlm.core.report.drawing import COLOURS, draw, load_matplotlib, to_png, to_svg
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
    Tokens,
    cell_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The browser loads nothing, whatever a caller may put into the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
NUMBER = re.compile(r"[-+−±~<>]?[\d.,]*\d[\d.,]*\s?(%|×|x|[kMBT]|s|ms|h|GB|MB|kB)?([ ]?±[ ]?[\d.]+)?")
NO_NUMBER = ("", "–", "-")


def html(report: Report, figures: Iterable["Figure"] | None = None) -> str:
    """The whole document; `figures` are the charts in their order, if they are drawn already."""
    style = files("braidlm.core.report").joinpath("page.css").read_text(encoding="utf-8")
    style += "".join(f".c{n} {{ --own: {colour}; }}\n" for n, colour in enumerate(COLOURS))
    subtitle = f'<p class="subtitle">{_inline(report.subtitle)}</p>' if report.subtitle else ""
    pictures = [part for part in report.parts if isinstance(part, Picture)]
    drawn = iter(figures if figures is not None else [draw(picture.chart) for picture in pictures])
    parts = [*([Text(report.verdict)] if report.verdict else []), *report.parts]
    body = "\n\n".join(_part(part, drawn) for part in parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="generator" content="Braid {__version__}">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header>
{_logo()}
<h1>{_inline(report.title)}</h1>
{subtitle}
</header>
<main>
{body}
</main>
<footer>Made by Braid {__version__}.</footer>
</body>
</html>
"""


def notebook(table: Table, notes: Sequence[str] = ()) -> str:
    """A table for `_repr_html_` of a result, which takes the style of the page around it, and sentences below."""
    return _table(table) + "".join(f"<p>{_inline(note)}</p>" for note in notes)


def _part(part: Part, drawn: Iterator["Figure"]) -> str:
    match part:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text():
            return "\n".join(f"<p>{_inline(paragraph)}</p>" for paragraph in part.paragraphs)
        case Links(links):
            items = (f'<li><a href="{url_quoted(file)}">{_inline(name)}</a></li>' for name, file in links.items())
            return f'<ul class="links">{"".join(items)}</ul>'
        case Facts(values):
            cards = (f"<div><dt>{_inline(k)}</dt><dd>{escape(cell_text(v))}</dd></div>" for k, v in values.items())
            return f'<dl class="facts">{"".join(cards)}</dl>'
        case Table():
            return f'<figure><div class="scroll" tabindex="0">{_table(part)}</div></figure>'
        case Picture(_, caption):
            svg = f'<div class="scroll" tabindex="0">{to_svg(next(drawn))}</div>'
            return f'<figure class="picture">{svg}{_caption(caption)}</figure>'
        case Quote(text, who, prompt, note):
            before = f'<span class="prompt">{escape(prompt)}</span>' if prompt else ""
            quoted = f"<blockquote>{before}{escape(text if prompt else text.strip())}</blockquote>"
            return f'<figure class="quote">{quoted}{_caption(", ".join(filter(None, (who, note))))}</figure>'
        case Tokens(rows, names, neutral, caption):
            styles = name_styles(names, neutral)
            legend = "".join(f'<li><span class="{styles[name]}">{escape(name)}</span></li>' for name in names)
            lines = "\n".join(
                f"<dt>{_inline(label)}</dt><dd>{''.join(_token(*piece, styles) for piece in pieces)}</dd>"
                for label, pieces in rows
            )
            return f'<figure class="tokens"><ul>{legend}</ul><dl>\n{lines}\n</dl>{_caption(caption)}</figure>'
        case Code(text, summary):
            listing = f"<pre>{escape(text.strip(chr(10)))}</pre>"
            if summary:
                listing = f"<details><summary>{_inline(summary)}</summary>{listing}</details>"
            return f'<div class="code">{listing}</div>'


def _table(table: Table) -> str:
    """Columns of numbers are right-aligned."""
    kinds = [' class="number"' if all(map(_is_number, values)) else "" for values in zip(*table.rows, strict=True)]
    kinds = kinds or [""] * len(table.columns)
    columns = zip(table.columns, kinds, strict=True)
    head = "".join(f'<th scope="col"{kind}>{_inline(name)}</th>' for name, kind in columns)
    rows = []
    for index, row in enumerate(table.rows):
        cells = "".join(f"<td{kind}>{_html_cell(value)}</td>" for value, kind in zip(row, kinds, strict=True))
        rows.append(f'<tr class="best">{cells}</tr>' if index == table.best else f"<tr>{cells}</tr>")
    lines = "\n".join(rows)
    title = f"<caption>{_inline(table.caption)}</caption>" if table.caption else ""
    over = "".join(f'<th scope="colgroup" colspan="{size}">{_inline(name)}</th>' for name, size in table.groups)
    over = f'<tr class="groups">{over}</tr>' if over else ""
    return f"<table>{title}<thead>{over}<tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table>"


def _html_cell(value: Any) -> str:
    if isinstance(value, Mark):
        hint = f' title="{escape(value.hint)}"' if value.hint else ""
        return f'<span class="chip {value.tone}"{hint}>{escape(value.text)}</span>'
    return _cell(value, _inline, "<strong>", "</strong>")


def _cell(value: Any, escaped: Callable[[str], str], bold: str, bold_end: str | None = None) -> str:
    """The text of a cell, escaped for its format; a `Strong` one between the format's marks of bold text."""
    text = escaped(cell_text(value))
    return f"{bold}{text}{bold if bold_end is None else bold_end}" if isinstance(value, Strong) else text


def _is_number(value: Any) -> bool:
    text = cell_text(value)
    return not isinstance(value, Mark) and (text in NO_NUMBER or NUMBER.fullmatch(text) is not None)


def name_styles(names: Sequence[str], neutral: Collection[str] = ()) -> dict[str, str]:
    """A CSS class for each name; with more names than colours, the colours repeat dashed."""
    coloured = [name for name in names if name not in neutral]
    styles = {name: f"c{n % len(COLOURS)}{' dashed' if n >= len(COLOURS) else ''}" for n, name in enumerate(coloured)}
    return styles | {name: "grey" for name in names if name in neutral}


def _token(text: str, name: str, styles: Mapping[str, str]) -> str:
    # A line break inside a token is made visible, and still breaks the line.
    shown = escape(text).replace("\n", "⏎\n") or "·"
    return f'<span class="{styles.get(name, "grey")}" title="{escape(name)}">{shown}</span>'


def _inline(text: str) -> str:
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text))


def _caption(text: str) -> str:
    return f"<figcaption>{_inline(text)}</figcaption>" if text else ""


def _logo() -> str:
    """A braid of three strands."""
    lines = []
    for crossing in range(10):
        # Between two crossings the strands keep their order in depth; the nearest is drawn last, with an outline.
        middle = crossing * math.pi / 3
        turns = sorted((math.sin(2 * (middle + 0.26 + k * math.tau / 3)), k) for k in range(3))
        for _, k in turns:
            ts = [middle + math.pi / 3 * (step / 6 - 0.5) for step in range(7)]
            path = " ".join(f"{t * 12 + 8:.1f},{13 + 8 * math.sin(t + k * math.tau / 3):.1f}" for t in ts)
            lines.append(f'<polyline points="{path}" stroke="var(--paper)" stroke-width="7"/>')
            lines.append(f'<polyline points="{path}" stroke="{COLOURS[k]}" stroke-width="3.4" stroke-linecap="round"/>')
    return f'<svg class="mark" viewBox="0 0 130 26" fill="none" aria-hidden="true">{"".join(lines)}</svg>'


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
            lines = [list(map(plain, part.columns)), ["---"] * len(part.columns)]
            lines += [[_cell(value, plain, "**").replace("\n", " ") for value in row] for row in part.rows]
            table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
            return f"{plain(part.caption)}\n\n{table}" if part.caption else table
        case Picture(_, caption, name) if name:
            return f"![{plain(caption)}]({name}.png)"
        case Quote(text, who, prompt, note):
            quoted = SPECIAL.sub(r"\\\g<0>", prompt + text).replace("`", r"\`").split("\n")
            said = "\n".join(f"> {line}".rstrip() + "  " for line in quoted)
            return "\n\n".join(filter(None, [f"**{plain(who)}**" if who else "", said, plain(note)]))
        case Code(text, summary) if not summary:
            return f"```\n{text.strip(chr(10))}\n```"
        case Links(files):
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
        case Facts(values):
            for name, value in values.items():
                console.show(f"{name}: {cell_text(value)}")
        case Table():
            rows = [[_cell(value, markup.escape, "[bold]", " *[/bold]") for value in row] for row in part.rows]
            columns = [markup.escape(name) for name in part.columns]
            console.table(columns, rows, part.title or part.caption or None, part.keep or None)
        case Quote(text, who, prompt, note):
            lines = [f"  {who}:"] if who else []
            lines += [f"    {line}".rstrip() for line in (prompt + text).split("\n")]
            console.show("\n".join([*lines, *([f"    {note}"] if note else []), ""]))


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
"""How a report is written as one file, by the extension of the file; as CSV, its first table for programs."""


def check_file(out: Path | str) -> None:
    """Raise an error, before any long work, if this file could not be written."""
    if Path(out).suffix not in FORMATS:
        raise BraidError(f"a report ends in {', '.join(FORMATS)}; its extension is its format", str(out))
    if Path(out).is_dir():
        raise BraidError("this is a folder", str(out), "Give the name of a file in it.")


def check_out(out: Path | str, verb: str, *names: str, fresh: bool = False, draws: bool = True) -> None:
    """Raise an error, before any long work, if `out` is not a folder of `verb`, or charts cannot be drawn.

    A folder of the verb has a file or folder of one of these names; one that is replaced (`fresh`) holds nothing but
    files of reports.
    """
    if draws:
        load_matplotlib()
    out = Path(out)
    if not out.exists():
        return
    inside = list(out.iterdir()) if out.is_dir() else []
    known = not inside or any(path.name in names for path in inside)
    if fresh:
        known = known and all(path.suffix in SUFFIXES for path in inside)
    if not (out.is_dir() and known):
        raise BraidError(f"this exists already and is not a report of `{verb}`", str(out), "Choose another folder.")
