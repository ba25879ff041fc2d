"""Reports as one self-contained HTML file: no network, no scripts, no fonts to fetch.

    page = Page("Two paths, one model", "What the demo did and how well it did it")
    page.facts({"bits per byte": "0.71", "parameters": 812_000})
    page.heading("Training").figure(to_svg(chart), "Loss over time.")
    page.write("report.html")

Every text is escaped; `backticks` become code.
"""

import base64
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote as url_quoted

from braidlm import __version__
from braidlm.core.errors import BraidError
from braidlm.core.files import write_text
from braidlm.core.report.figure_style import COLOURS
from braidlm.core.report.report import Mark, Strong, cell_text

# The browser loads nothing, whatever a caller may put into the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
PNG = b"\x89PNG\r\n\x1a\n"
NUMBER = re.compile(r"[-+−±~<>]?[\d.,]*\d[\d.,]*\s?(%|×|x|[kMBT]|s|ms|h|GB|MB|kB)?([ ]?±[ ]?[\d.]+)?")
NO_NUMBER = ("", "–", "-")
ACTIVE = re.compile(
    r"<\s*(script|foreignObject|iframe)|\son\w+\s*=\s*[\"']|(href|src)\s*=\s*[\"']\s*(?!#|data:)|@import|url\(\s*[^#)]",
    re.IGNORECASE,
)
LOCAL_FILE = re.compile(r"(?!/)[^:\\?#]+")
"""A relative path: neither a scheme nor a host, so that a link leads nowhere but to the disk."""


class Page:
    """A report from top to bottom; every method adds a part and returns the page."""

    def __init__(self, title: str, subtitle: str = "", footer: str = f"Made by Braid {__version__}."):
        self.title, self.subtitle, self.footer = title, subtitle, footer
        self._parts: list[str] = []

    def heading(self, text: str, level: int = 2) -> Self:
        """A section (2) or a part of one (3)."""
        if level not in (2, 3):
            raise BraidError(f"a heading has level 2 or 3, not {level}", f"page '{self.title}'")
        return self._add(f"<h{level}>{_inline(text)}</h{level}>")

    def text(self, text: str) -> Self:
        """Prose; an empty line begins a new paragraph."""
        paragraphs = re.split(r"\n\s*\n", text.strip())
        return self._add("\n".join(f"<p>{_inline(paragraph)}</p>" for paragraph in paragraphs))

    def links(self, links: Mapping[str, str]) -> Self:
        """Links to files beside the page: {what it is: the file, relative to the page}."""
        for file in links.values():
            if not LOCAL_FILE.fullmatch(file):
                raise BraidError(f"a page links to files beside it, not to '{file}'", f"page '{self.title}'")
        items = (f'<li><a href="{url_quoted(file)}">{_inline(name)}</a></li>' for name, file in links.items())
        return self._add(f'<ul class="links">{"".join(items)}</ul>')

    def facts(self, facts: Mapping[str, Any]) -> Self:
        """Key figures, each a card: {what it is: the figure}."""
        shown = {_inline(name): escape(cell_text(value)) for name, value in facts.items()}
        cards = (f"<div><dt>{name}</dt><dd>{figure}</dd></div>" for name, figure in shown.items())
        return self._add(f'<dl class="facts">{"".join(cards)}</dl>')

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        caption: str = "",
        best: int | None = None,
        groups: Sequence[tuple[str, int]] = (),
    ) -> Self:
        """A table; columns of numbers are right-aligned, row `best` is emphasised, a cell may be a `Mark` or `Strong`.

        `groups` are headings over several columns each: (heading, how many columns).
        """
        body = [[value if isinstance(value, (Mark, Strong)) else cell_text(value) for value in row] for row in rows]
        for index, row in enumerate(body):
            if len(row) != len(columns):
                raise BraidError(
                    f"row {index} has {len(row)} cells for {len(columns)} columns", f"table '{caption or columns[0]}'"
                )
        kinds = [' class="number"' if body and all(map(_is_number, cells)) else "" for cells in zip(*body, strict=True)]
        kinds = kinds or [""] * len(columns)
        head = "".join(f'<th scope="col"{kind}>{_inline(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
        lines = "\n".join(_row(row, kinds, index == best) for index, row in enumerate(body))
        title = f"<caption>{_inline(caption)}</caption>" if caption else ""
        over = "".join(f'<th scope="colgroup" colspan="{size}">{_inline(name)}</th>' for name, size in groups)
        over = f'<tr class="groups">{over}</tr>' if groups else ""
        return self._add(
            f'<figure><div class="scroll" tabindex="0"><table>{title}<thead>{over}<tr>{head}</tr></thead>\n'
            f"<tbody>\n{lines}\n</tbody></table></div></figure>"
        )

    def figure(self, picture: str | bytes, caption: str = "", alt: str = "") -> Self:
        """An SVG element (as text) or a PNG (as bytes), embedded in the page."""
        inner = _svg(picture) if isinstance(picture, str) else _png(picture, alt or caption)
        return self._add(
            f'<figure class="picture"><div class="scroll" tabindex="0">{inner}</div>{_caption(caption)}</figure>'
        )

    def quote(self, text: str, caption: str = "", prompt: str = "") -> Self:
        """A sample text with its line breaks; `prompt` is the text before it that the model was given."""
        before = f'<span class="prompt">{escape(prompt)}</span>' if prompt else ""
        body = escape(text if prompt else text.strip())
        return self._add(f'<figure class="quote"><blockquote>{before}{body}</blockquote>{_caption(caption)}</figure>')

    def tokens(
        self,
        rows: Iterable[tuple[str, Sequence[tuple[str, str]]]],
        names: Sequence[str],
        neutral: Collection[str] = (),
        caption: str = "",
    ) -> Self:
        """A text token by token, a row for each (label, [(token, name)]): every token in the colour of its name.

        `names` are all names, in the order of their colours; those in `neutral`, and any other, are grey.
        """
        styles = name_styles(names, neutral)
        legend = "".join(f'<li><span class="{styles[name]}">{escape(name)}</span></li>' for name in names)
        lines = "\n".join(
            f"<dt>{_inline(label)}</dt><dd>{''.join(_token(text, name, styles) for text, name in pieces)}</dd>"
            for label, pieces in rows
        )
        return self._add(f'<figure class="tokens"><ul>{legend}</ul><dl>\n{lines}\n</dl>{_caption(caption)}</figure>')

    def code(self, text: str, summary: str = "") -> Self:
        """A listing; with a summary it is collapsed under it."""
        listing = f"<pre>{escape(text.strip(chr(10)))}</pre>"
        if summary:
            listing = f"<details><summary>{_inline(summary)}</summary>{listing}</details>"
        return self._add(f'<div class="code">{listing}</div>')

    def html(self) -> str:
        """The whole document."""
        style = files("braidlm.core.report").joinpath("page.css").read_text(encoding="utf-8")
        style += "".join(f".c{n} {{ --own: {colour}; }}\n" for n, colour in enumerate(COLOURS))
        subtitle = f'<p class="subtitle">{_inline(self.subtitle)}</p>' if self.subtitle else ""
        body = "\n\n".join(self._parts)
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="generator" content="Braid {__version__}">
<title>{escape(self.title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header>
{_logo()}
<h1>{_inline(self.title)}</h1>
{subtitle}
</header>
<main>
{body}
</main>
<footer>{_inline(self.footer)}</footer>
</body>
</html>
"""

    def write(self, path: Path | str) -> None:
        """Write the page; it appears only when it is complete."""
        write_text(path, self.html())

    def _add(self, part: str) -> Self:
        self._parts.append(part)
        return self


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


def _row(cells: Sequence[str | Mark], kinds: Sequence[str], best: bool) -> str:
    inner = "".join(f"<td{kind}>{_content(cell)}</td>" for cell, kind in zip(cells, kinds, strict=True))
    return f'<tr class="best">{inner}</tr>' if best else f"<tr>{inner}</tr>"


def _content(cell: str | Mark) -> str:
    if isinstance(cell, Strong):
        return f"<strong>{_inline(cell)}</strong>"
    if isinstance(cell, str):
        return _inline(cell)
    hint = f' title="{escape(cell.hint)}"' if cell.hint else ""
    return f'<span class="chip {cell.tone}"{hint}>{escape(cell.text)}</span>'


def _is_number(cell: str | Mark) -> bool:
    return isinstance(cell, str) and (cell in NO_NUMBER or NUMBER.fullmatch(cell) is not None)


def _svg(text: str) -> str:
    if not text.lstrip().startswith("<svg"):
        raise BraidError("a picture given as text must be an <svg> element", "page figure", "Use figures.to_svg.")
    if match := ACTIVE.search(text):
        raise BraidError(f"an SVG in a page may run and load nothing, but has {match[0].strip()!r}", "page figure")
    return text


def _png(data: bytes, alt: str) -> str:
    if not data.startswith(PNG):
        raise BraidError("a picture given as bytes must be a PNG", "page figure")
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(data).decode("ascii")}">'


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
