"""The report page: escaped, well formed, and complete in one file."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from braidlm.core.errors import BraidError
from braidlm.core.report.chart_data import chart_data, chart_table
from braidlm.core.report.page import html, name_styles, notebook
from braidlm.core.report.report import (
    COLOURS,
    INK,
    Bars,
    Chart,
    HeatMap,
    HeatMaps,
    Lines,
    Mark,
    Points,
    Report,
    StackedShares,
    Strong,
    Table,
    Tokens,
)

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
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def every_chart(name: str = "a") -> dict[str, Chart]:
    """A chart of each kind, with this name wherever there is one."""
    heat = HeatMap(name, ["1", name], ["x", name], [[0.25, 0.5], [math.nan, 1.0]])
    return {
        "lines": Lines(
            {name: ([1, 2, 3], [3.5, math.nan, 2.5]), "b": ([2, 4], [1.0, math.inf])},
            name,
            name,
            name,
            {"level": 1.5},
            errors={"b": [0.25, None]},
        ),
        "points": Points({name: (1.0, 2.0), "b": (0.5, 4.0)}, name, name, colours={name: COLOURS[1]}, log=True),
        "bars": Bars({name: {name: 1.25, "b": -2.0}}, name, colours={"b": INK}),
        "shares": StackedShares({name: {(name, "row"): {name: 0.75, "mix": 0.25}}}, [name, "mix"], ["mix"]),
        "heat": HeatMaps([[heat]], name),
    }


def full_report(text: str = "some text") -> Report:
    report = Report(text, text, text)
    report.heading(text).heading(text, 3).text(text).facts({text: text, "count": 1234567})
    report.table(Table([text, "n"], [[text, 1], [text, 2.5]], text, best=1)).chart(Bars({"a": 1.0}, "v"), text)
    return report.quote(text, text, prompt=text, note=text).code(text).code(text, summary=text)


def test_everything_is_escaped() -> None:
    outline = Outline(html(full_report(NASTY)))
    assert [script["type"] for script in outline.all("script")] == ["application/json", "module"]
    assert outline.text.count(NASTY) == 21


@pytest.mark.parametrize("kind", every_chart())
def test_a_chart_is_data_that_cannot_become_markup(kind: str) -> None:
    page = html(Report("t").chart(every_chart(NASTY + "<!--")[kind], name="x"))
    assert len(Outline(page).all("script")) == 2
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert "<" not in data
    chart = json.loads(data)
    assert (chart["kind"], chart["name"]) == (kind, "x")
    assert NASTY + "<!--" in str(chart).replace('\\"', '"').replace("\\'", "'")


def test_charts_have_their_values_as_data_and_in_a_table_behind_them() -> None:
    data = {kind: chart_data(chart) for kind, chart in every_chart().items()}
    assert data["lines"]["series"] == {"a": [[1, 2, 3], [3.5, None, 2.5]], "b": [[2, 4], [1.0, None]]}
    assert data["points"]["colours"] == {"a": COLOURS[1]}
    assert data["bars"]["values"] == {"a": {"a": 1.25, "b": -2.0}}
    assert data["bars"]["colours"] == {"b": INK}
    assert data["shares"]["panels"] == {"a": [["a", "row", {"a": 0.75, "mix": 0.25}]]}
    assert data["heat"]["maps"][0][0]["values"] == [[0.25, 0.5], [None, 1.0]]
    tables = {kind: chart_table(chart) for kind, chart in every_chart().items()}
    assert tables["lines"].columns[-1] == "b, standard error"
    assert tables["lines"].rows == [[1, 3.5, None, None], [2, None, 1.0, 0.25], [3, 2.5, None, None], [4, *[None] * 3]]
    assert tables["points"].rows == [["a", 1.0, 2.0], ["b", 0.5, 4.0]]
    assert tables["bars"].rows == [["a", "a", 1.25], ["a", "b", -2.0]]
    assert tables["shares"].rows == [["a", "a", "row", 0.75, 0.25]]
    assert tables["heat"].rows[2] == ["a", "a", "x", None]
    assert "<summary>The values</summary>" in html(Report("t").chart(every_chart()["heat"]))


def test_the_table_behind_many_points_has_some_of_them_and_says_so() -> None:
    steps = list(range(100))
    table = chart_table(Lines({"a": (np.array(steps), np.array(steps) / 2)}, "step", "y"))
    assert (table.rows[0], table.rows[-1]) == ([0, 0.0], [99, 49.5])
    assert table.caption == f"{len(table.rows)} of 100 points."
    assert len(table.rows) <= 25


def test_structure() -> None:
    document = html(full_report())
    outline = Outline(document)
    assert document.startswith("<!DOCTYPE html>")
    for tag in ("html", "head", "title", "body", "header", "h1", "main", "footer"):
        assert len(outline.all(tag)) == 1, tag
    # The second ones hold the values of the chart.
    assert len(outline.all("table")) == len(outline.all("details")) == 2
    assert outline.all("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in outline.all("meta"))
    assert "color-scheme: light dark" in document
    assert "--paper: light-dark(" in document
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


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else() -> None:
    document = html(full_report(NASTY))
    (policy,) = [meta["content"] for meta in Outline(document).all("meta") if "http-equiv" in meta]
    (style,) = re.findall(r"<style>(.*?)</style>", document, re.DOTALL)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', document, re.DOTALL)

    def sha256(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert policy == (
        f"default-src 'none'; script-src {sha256(script)}; style-src {sha256(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"\sstyle=|\son\w+=", document.replace(script, "").replace(style, ""))
    assert not re.search(r"^import ", script, re.MULTILINE)


def test_title_and_verdict_can_be_read_from_the_head() -> None:
    outline = Outline(html(Report(NASTY, "sub", f"`a` wins {NASTY}\n\nby 2%.")))
    meta = {tag["name"]: tag["content"] for tag in outline.all("meta") if "name" in tag}
    assert meta["description"] == f"a wins {NASTY} by 2%."
    assert str(meta["generator"]).startswith("Braid ")
    assert [section["aria-label"] for section in outline.all("section")] == ["Verdict"]


def test_a_long_page_has_contents_that_lead_to_its_sections() -> None:
    report = Report("t")
    for name in ("One & all", "Two", "Two", "<three>"):
        report.heading(name).heading("part", 3)
    outline = Outline(html(report))
    targets = [str(link["href"])[1:] for link in outline.all("a")]
    assert targets == [tag["id"] for tag in outline.all("h2")]
    assert targets[0] == "one-all"
    ids = [tag["id"] for _, tag in outline.tags if "id" in tag]
    assert len(ids) == len(set(ids)) == 8
    assert not Outline(html(Report("t").heading("One"))).all("nav")


def test_links_lead_to_files_beside_the_page_and_nowhere_else() -> None:
    outline = Outline(html(Report("t").links({NASTY: "routes/a b.html", "back": "../report.html"})))
    assert [a["href"] for a in outline.all("a")] == ["routes/a%20b.html", "../report.html"]
    assert NASTY in outline.text
    for file in ("https://example.org", "//example.org", "/etc/passwd", "javascript:alert(1)", "\\\\host\\file", ""):
        with pytest.raises(BraidError, match="a report links to files beside it"):
            Report("t").links({"x": file})


def test_what_cannot_be_drawn_is_explained() -> None:
    for empty in (
        lambda: Lines({}, "x", "y"),
        lambda: Points({}, "x", "y"),
        lambda: Bars({}, "v"),
        lambda: StackedShares({"one": {}}, ["a"]),
        lambda: HeatMaps([], "load"),
    ):
        with pytest.raises(BraidError, match="nothing to draw"):
            empty()
    with pytest.raises(BraidError, match="line 'a': 2 xs but 1 ys"):
        Lines({"a": ([1, 2], [1])}, "x", "y")


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
    assert of_table(["time"], [["8.1s"], ["1m07s"], ["2h01m + 4s"]]).count('<td class="number">') == 3


def test_an_empty_table_keeps_its_columns() -> None:
    assert of_table(["a", "b"], []).count("<th ") == 2


def test_marks_and_strong_cells_stand_in_tables_and_are_escaped() -> None:
    page = of_table(["", "n"], [["x", Mark("<a>", "right", '"b"')], [Strong("<y>"), Mark("2", "wrong")]])
    assert '<span class="chip right" title="&quot;b&quot;">&lt;a&gt;</span>' in page
    assert '<td><strong>&lt;y&gt;</strong></td><td><span class="chip wrong">2</span></td>' in page


def test_headings_over_columns() -> None:
    page = of_table(["a", "b", "c"], [[1, 2, 3]], groups=[("", 1), ("both & all", 2)])
    assert '<tr class="groups"><td colspan="1"></td>' in page
    assert '<th scope="colgroup" colspan="2">both &amp; all</th>' in page
    assert "<tr class" not in of_table(["a"], [[1]])


def test_a_notebook_has_the_same_table_and_notes_below() -> None:
    table = Table(["<a>", "b"], [[1234567, 0.123456], [None, "<script>"]])
    shown = notebook(table, ["a & b"])
    assert shown.removesuffix("<p>a &amp; b</p>") in html(Report("t").table(table))
    assert "<script>" not in shown


def test_tokens_have_the_colour_of_their_name() -> None:
    rows = [("layer 1", [("One", "a"), (" <day>\n", "b"), ("", "mix")])]
    page = html(Report("t").add(Tokens(rows, ["a", "b", "mix"], ["mix"], "About.")))
    assert '<span class="c1" title="a">One</span><span class="c2" title="b"> &lt;day&gt;⏎\n</span>' in page
    assert '<span class="grey" title="mix">·</span>' in page
    assert page.count("<li>") == 3
    assert ".c2 { --own: var(--c2); }" in page


def test_more_names_than_colours() -> None:
    names = [f"n{i}" for i in range(7)]
    styles = name_styles([*names, "mix"], ["mix"])
    assert len(set(styles.values())) == 8
    assert (styles["n0"], styles["n5"], styles["mix"]) == ("c1", "c1 dashed", "grey")


def test_paragraphs_code_and_lines() -> None:
    document = html(Report("t").text("One `braid demo`.\n\nTwo.").quote("line one\nline two", prompt="Once "))
    assert "<p>One <code>braid demo</code>.</p>\n<p>Two.</p>" in document
    assert '<span class="prompt">Once </span>line one\nline two</blockquote>' in document


def test_a_long_fact_has_more_room() -> None:
    document = html(Report("t").facts({"steps": "100", "machine": "an old CPU with two cores"}))
    assert "<div><dt>steps</dt>" in document
    assert '<div class="long"><dt>machine</dt>' in document


def test_headings_have_two_levels() -> None:
    with pytest.raises(BraidError, match="level 2 or 3, not 1"):
        Report("t").heading("x", 1)
