"""A report as a page: one file with its style, its scripts and the data of its charts in it.

The browser loads nothing and runs nothing but these scripts, and every text is escaped. Without scripts the values of
each chart stand in a table.
"""

import base64
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any
from urllib.parse import quote as url_quoted

from braidlm import __version__
from braidlm.core.report import report as report_parts
from braidlm.core.report.chart_data import chart_data, chart_table
from braidlm.core.report.report import COLOURS, Heading, Mark, Part, Report, Strong, Table, Text, cell_text

STYLES = ("tokens.css", "charts.css", "page.css")
SCRIPTS = ("vendor/d3.js", "charts.js", "reading.js")
SECTIONS = 4
"""A page with so many sections has a table of contents."""
WIDE = 6
"""A table of so many columns may be wider than the text beside it."""
LONG = 14
"""A fact of more letters is written smaller, and has more room."""
NUMBER = re.compile(r"[-+−±~<>]?[\d.,]*\d[\d.,]*\s?(%|×|x|[kMBT]|m?s|h|[hm]\d+[ms]|days|GB|MB|kB)?([ ]?±[ ]?[\d.]+)?")
NO_NUMBER = ("", "–", "-")


@cache
def _assets() -> tuple[str, str, str, str]:
    """The style, the script (one module: what a file imports stands above it), their policy, the logo."""

    def joined(*names: str) -> str:
        folder = files("braidlm.core.report")
        texts = (folder.joinpath(name).read_text(encoding="utf-8") for name in names)
        return "\n" + "\n".join(re.sub(r"^import .*\n", "", text, flags=re.MULTILINE) for text in texts)

    def sha256(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    style, script = joined(*STYLES), joined(*SCRIPTS)
    # Whatever a caller may put into the page, nothing is loaded, and no other script or style counts.
    sources = f"script-src {sha256(script)}; style-src {sha256(style)}; img-src data: blob:"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    return style, script, policy, joined("logo.svg").strip()


def html(report: Report) -> str:
    """The whole document."""
    style, script, policy, logo = _assets()
    subtitle = f'<p class="subtitle">{_inline(report.subtitle)}</p>' if report.subtitle else ""
    said = Text(report.verdict)
    verdict = f'<section class="verdict" aria-label="Verdict">\n{_part(said)}\n</section>' if report.verdict else ""
    about = " ".join(" ".join(said.paragraphs).replace("`", "").split()) or report.subtitle
    ids = _ids(report.parts)
    shown = (_part(part).replace(">", f' id="{at}">', bool(at)) for part, at in zip(report.parts, ids, strict=True))
    body = "\n\n".join(shown)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="Braid {__version__}">
<meta name="description" content="{escape(about)}">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header class="report">
{logo}
<h1>{_inline(report.title)}</h1>
{subtitle}
</header>
<main>
{verdict}
{_contents(report.parts, ids)}
{body}
</main>
<footer>Made by Braid {__version__}.</footer>
<script type="module">{script}</script>
</body>
</html>
"""


def notebook(table: Table, notes: Sequence[str] = ()) -> str:
    """A table for `_repr_html_` of a result, which takes the style of the page around it, and sentences below."""
    return _table(table) + "".join(f"<p>{_inline(note)}</p>" for note in notes)


def _ids(parts: Sequence[Part]) -> list[str]:
    """For each part an id, from the words of a heading; nothing for other parts."""
    ids: list[str] = []
    for part in parts:
        words = re.sub(r"\W+", "-", part.text.lower()).strip("-") or "section" if isinstance(part, Heading) else ""
        ids.append(f"{words}-{len(ids)}" if words and words in ids else words)
    return ids


def _contents(parts: Sequence[Part], ids: Sequence[str]) -> str:
    sections = [(one, at) for one, at in zip(parts, ids, strict=True) if isinstance(one, Heading) and one.level == 2]
    if len(sections) < SECTIONS:
        return ""
    items = "".join(f'<li><a href="#{at}">{_inline(one.text)}</a></li>' for one, at in sections)
    listed = f"<details><summary>Contents</summary><ol>{items}</ol></details>"
    return f'<nav class="contents" aria-label="Contents">{listed}</nav>'


def _part(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text():
            return "\n".join(f"<p>{_inline(paragraph)}</p>" for paragraph in part.paragraphs)
        case report_parts.Links(links):
            items = (f'<li><a href="{url_quoted(file)}">{_inline(name)}</a></li>' for name, file in links.items())
            return f'<ul class="links">{"".join(items)}</ul>'
        case report_parts.Facts(values):
            texts = {name: cell_text(value) for name, value in values.items()}
            sizes = (' class="long"' if len(text) > LONG else "" for text in texts.values())
            facts = zip(sizes, texts.items(), strict=True)
            cards = (f"<div{size}><dt>{_inline(k)}</dt><dd>{escape(v)}</dd></div>" for size, (k, v) in facts)
            return f'<dl class="facts">{"".join(cards)}</dl>'
        case Table():
            wide = ' class="wide"' if len(part.columns) >= WIDE else ""
            return f"<figure{wide}>{_caption(part.caption)}{_scroll(part)}</figure>"
        case report_parts.Picture(chart, caption, name):
            data = json.dumps(chart_data(chart) | {"name": name}, ensure_ascii=False, separators=(",", ":"))
            # Within a script `</script` and `<!--` would count even in a string.
            script = f'<script type="application/json">{data.replace("<", chr(92) + "u003c")}</script>'
            points = chart_table(chart)
            shown = f"{_caption(points.caption)}{_scroll(points)}".replace("figcaption", "p")
            table = f"<details open><summary>The values</summary>{shown}</details>"
            return f'<figure class="picture"><div class="chart"></div>{script}{_caption(caption)}{table}</figure>'
        case report_parts.Quote(text, who, prompt, note):
            before = f'<span class="prompt">{escape(prompt)}</span>' if prompt else ""
            quoted = f"<blockquote>{before}{escape(text if prompt else text.strip())}</blockquote>"
            return f'<figure class="quote">{quoted}{_caption(", ".join(filter(None, (who, note))))}</figure>'
        case report_parts.Tokens(rows, names, neutral, caption):
            styles = name_styles(names, neutral)
            legend = "".join(f'<li><span class="{styles[name]}">{escape(name)}</span></li>' for name in names)
            lines = "\n".join(
                f"<dt>{_inline(label)}</dt><dd>{''.join(_token(*piece, styles) for piece in pieces)}</dd>"
                for label, pieces in rows
            )
            return f'<figure class="tokens"><ul>{legend}</ul><dl>\n{lines}\n</dl>{_caption(caption)}</figure>'
        case report_parts.Code(text, summary):
            listing = f'<pre tabindex="0">{escape(text.strip(chr(10)))}</pre>'
            if summary:
                listing = f"<details><summary>{_inline(summary)}</summary>{listing}</details>"
            return f'<div class="code">{listing}</div>'


def _scroll(table: Table) -> str:
    """A table that scrolls in itself where it is wider than the screen; its caption stands above and does not."""
    bare = _table(replace(table, caption=""))
    return f'<div class="scroll" tabindex="0" role="group" aria-label="Table">{bare}</div>'


def _table(table: Table) -> str:
    """Columns of numbers are right-aligned."""
    kinds = [' class="number"' if all(map(_is_number, values)) else "" for values in zip(*table.rows, strict=True)]
    kinds = kinds or [""] * len(table.columns)
    columns = zip(table.columns, kinds, strict=True)
    head = "".join(f'<th scope="col"{kind}>{_inline(name)}</th>' for name, kind in columns)
    rows = []
    for index, row in enumerate(table.rows):
        cells = "".join(f"<td{kind}>{_cell(value)}</td>" for value, kind in zip(row, kinds, strict=True))
        rows.append(f'<tr class="best">{cells}</tr>' if index == table.best else f"<tr>{cells}</tr>")
    lines = "\n".join(rows)
    title = f"<caption>{_inline(table.caption)}</caption>" if table.caption else ""
    heads = [('th scope="colgroup"', "th") if name else ("td", "td") for name, _ in table.groups]
    groups = zip(heads, table.groups, strict=True)
    over = "".join(f'<{tag} colspan="{n}">{_inline(name)}</{end}>' for (tag, end), (name, n) in groups)
    over = f'<tr class="groups">{over}</tr>' if over else ""
    return f"<table>{title}<thead>{over}<tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, Mark):
        hint = f' title="{escape(value.hint)}"' if value.hint else ""
        return f'<span class="chip {value.tone}"{hint}>{escape(value.text)}</span>'
    text = _inline(cell_text(value))
    return f"<strong>{text}</strong>" if isinstance(value, Strong) else text


def _is_number(value: Any) -> bool:
    text = cell_text(value)
    return not isinstance(value, Mark) and (text in NO_NUMBER or all(map(NUMBER.fullmatch, text.split(" + "))))


def name_styles(names: Sequence[str], neutral: Collection[str] = ()) -> dict[str, str]:
    """A CSS class for each name; with more names than colours, the colours repeat dashed."""
    coloured = [name for name in names if name not in neutral]
    size = len(COLOURS)
    styles = {name: f"c{n % size + 1}{' dashed' if n >= size else ''}" for n, name in enumerate(coloured)}
    return styles | {name: "grey" for name in names if name in neutral}


def _token(text: str, name: str, styles: Mapping[str, str]) -> str:
    # A line break inside a token is made visible, and still breaks the line.
    shown = escape(text).replace("\n", "⏎\n") or "·"
    return f'<span class="{styles.get(name, "grey")}" title="{escape(name)}">{shown}</span>'


def _inline(text: str) -> str:
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape(text))


def _caption(text: str) -> str:
    return f"<figcaption>{_inline(text)}</figcaption>" if text else ""
