"""The report page: escaped, well formed, and complete in one file."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from braidlm.core.errors import BraidError
from braidlm.core.report.drawing import COLOURS
from braidlm.core.report.rendering import html, name_styles, notebook
from braidlm.core.report.report import Bars, Mark, Report, Strong, Table

VOID = {"meta", "link", "img", "br", "hr"}
NASTY = "<script>alert('1')</script> & \"quotes\""


class Outline(HTMLParser):
    """Reads a document, failing on tags that do not close in order; keeps its tags, loads and text."""

    def __init__(self, document: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(document)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def full_report(text: str = "some text") -> Report:
    report = Report(text, text, text)
    report.heading(text).heading(text, 3).text(text).facts({text: text, "count": 1234567})
    report.table(Table([text, "n"], [[text, 1], [text, 2.5]], text, best=1)).chart(Bars({"a": 1.0}, "v"), text)
    return report.quote(text, text, prompt=text, note=text).code(text).code(text, summary=text)


def test_everything_is_escaped() -> None:
    outline = Outline(html(full_report(NASTY)))
    assert not outline.all("script")
    assert outline.text.count(NASTY) == 21


def test_structure() -> None:
    document = html(full_report())
    outline = Outline(document)
    assert document.startswith("<!DOCTYPE html>")
    for tag in ("html", "head", "title", "body", "header", "h1", "main", "table", "footer", "details"):
        assert len(outline.all(tag)) == 1, tag
    assert outline.all("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in outline.all("meta"))
    assert "prefers-color-scheme: dark" in document
    assert "@media print" in document


def test_loads_nothing_from_elsewhere() -> None:
    document = html(full_report())
    for tag, attributes in Outline(document).tags:
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, name, value)
    style = "".join(re.findall(r"<style>(.*?)</style>", document, re.DOTALL))
    assert "url(" not in style
    assert "@import" not in style
    policies = [m["content"] for m in Outline(document).all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_links_lead_to_files_beside_the_page_and_nowhere_else() -> None:
    outline = Outline(html(Report("t").links({NASTY: "routes/a b.html", "back": "../report.html"})))
    assert [a["href"] for a in outline.all("a")] == ["routes/a%20b.html", "../report.html"]
    assert NASTY in outline.text
    for file in ("https://example.org", "//example.org", "/etc/passwd", "javascript:alert(1)", "\\\\host\\file", ""):
        with pytest.raises(BraidError, match="a report links to files beside it"):
            Report("t").links({"x": file})


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(BraidError, match=r"table 'Scores': row 1 has 3 cells for 2 columns"):
        Table(["a", "b"], [[1, 2], [1, 2, 3]], "Scores")


def of_table(*args: Any, **options: Any) -> str:
    return html(Report("t").table(Table(*args, **options)))


def test_tables_show_values_for_people() -> None:
    rows = [["a", 12345, "3.1%", "x", True], ["b", None, "−2 ± 0.5", 0.123456, False]]
    document = of_table(["name", "n", "share", "mixed", "on"], rows, best=0)
    cells = re.findall(r"<td([^>]*)>(.*?)</td>", document)
    assert [text for _, text in cells] == ["a", "12,345", "3.1%", "x", "yes", "b", "–", "−2 ± 0.5", "0.1235", "no"]
    assert ["number" in kind for kind, _ in cells] == [False, True, True, False, False] * 2
    assert document.count('<tr class="best">') == 1


def test_an_empty_table_keeps_its_columns() -> None:
    assert of_table(["a", "b"], []).count("<th ") == 2


def test_marks_and_strong_cells_stand_in_tables_and_are_escaped() -> None:
    page = of_table(["", "n"], [["x", Mark("<a>", "right", '"b"')], [Strong("<y>"), Mark("2", "wrong")]])
    assert '<span class="chip right" title="&quot;b&quot;">&lt;a&gt;</span>' in page
    assert '<td><strong>&lt;y&gt;</strong></td><td><span class="chip wrong">2</span></td>' in page


def test_headings_over_columns() -> None:
    page = of_table(["a", "b", "c"], [[1, 2, 3]], groups=[("", 1), ("both & all", 2)])
    assert '<tr class="groups"><th scope="colgroup" colspan="1"></th>' in page
    assert '<th scope="colgroup" colspan="2">both &amp; all</th>' in page
    assert "<tr class" not in of_table(["a"], [[1]])


def test_a_notebook_has_the_same_table_and_notes_below() -> None:
    table = Table(["<a>", "b"], [[1234567, 0.123456], [None, "<script>"]])
    shown = notebook(table, ["a & b"])
    assert shown.removesuffix("<p>a &amp; b</p>") in html(Report("t").table(table))
    assert "<script>" not in shown


def test_tokens_have_the_colour_of_their_name() -> None:
    rows = [("layer 1", [("One", "a"), (" <day>\n", "b"), ("", "mix")])]
    page = html(Report("t").tokens(rows, ["a", "b", "mix"], ["mix"], "About."))
    assert '<span class="c0" title="a">One</span><span class="c1" title="b"> &lt;day&gt;⏎\n</span>' in page
    assert '<span class="grey" title="mix">·</span>' in page
    assert page.count("<li>") == 3
    assert f".c1 {{ --own: {COLOURS[1]}; }}" in page


def test_more_names_than_colours() -> None:
    names = [f"n{i}" for i in range(7)]
    styles = name_styles([*names, "mix"], ["mix"])
    assert len(set(styles.values())) == 8
    assert (styles["n0"], styles["n5"], styles["mix"]) == ("c0", "c0 dashed", "grey")


def test_paragraphs_code_and_lines() -> None:
    document = html(Report("t").text("One `braid demo`.\n\nTwo.").quote("line one\nline two", prompt="Once "))
    assert "<p>One <code>braid demo</code>.</p>\n<p>Two.</p>" in document
    assert '<span class="prompt">Once </span>line one\nline two</blockquote>' in document


def test_headings_have_two_levels() -> None:
    with pytest.raises(BraidError, match="level 2 or 3, not 1"):
        Report("t").heading("x", 1)
