"""Tables for notebooks: what `_repr_html_` of a result returns. Every text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from braidlm.core.report.page import cell_text


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], notes: Sequence[str] = ()) -> str:
    """A plain table, which takes the style of the page around it, and sentences below it."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell_text(value))}</td>' for value in row)}</tr>" for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
