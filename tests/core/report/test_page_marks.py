"""Cells that are right or wrong, headings over columns, texts token by token, and charts of shares."""

import re

import pytest

pytest.importorskip("matplotlib")

from braidlm.core.errors import BraidError
from braidlm.core.report.figure_style import COLOURS
from braidlm.core.report.figures import to_svg
from braidlm.core.report.page import Mark, Page, name_styles
from braidlm.core.report.share_chart import share_chart


def test_marks_stand_in_tables_and_are_escaped() -> None:
    rows = [["x", Mark("<a>", "right", '"b"')], ["y", Mark("2", "wrong")]]
    page = Page("t").table(["", "n"], rows).html()
    assert '<span class="chip right" title="&quot;b&quot;">&lt;a&gt;</span>' in page
    assert '<td><span class="chip wrong">2</span></td>' in page


def test_headings_over_columns() -> None:
    page = Page("t").table(["a", "b", "c"], [[1, 2, 3]], groups=[("", 1), ("both & all", 2)]).html()
    assert '<tr class="groups"><th scope="colgroup" colspan="1"></th>' in page
    assert '<th scope="colgroup" colspan="2">both &amp; all</th>' in page
    assert "<tr class" not in Page("t").table(["a"], [[1]]).html()


def test_tokens_have_the_colour_of_their_name() -> None:
    rows = [("layer 1", [("One", "a"), (" <day>\n", "b"), ("", "mix")])]
    page = Page("t").tokens(rows, ["a", "b", "mix"], ["mix"], "About.").html()
    assert '<span class="c0" title="a">One</span><span class="c1" title="b"> &lt;day&gt;⏎\n</span>' in page
    assert '<span class="grey" title="mix">·</span>' in page
    assert page.count("<li>") == 3
    assert f".c1 {{ --own: {COLOURS[1]}; }}" in page


def test_more_names_than_colours() -> None:
    names = [f"n{i}" for i in range(7)]
    styles = name_styles([*names, "mix"], ["mix"])
    assert len(set(styles.values())) == 8
    assert (styles["n0"], styles["n5"], styles["mix"]) == ("c0", "c0 dashed", "grey")


def test_a_chart_of_shares() -> None:
    shares = {("layer 1", "stories"): {"a": 0.75, "b": 0.25}, ("layer 1", "maths"): {"mix": 1.0}}
    svg = to_svg(share_chart({"one": shares, "two": {("layer 2", "stories"): {"a": 1.0}}}, ["a", "b", "mix"], ["mix"]))
    found = set(re.findall(r"<text[^>]*>([^<]+)</text>", svg))
    assert {"layer 1", "layer 2", "stories", "maths", "75%", "25%", "100%", "one", "two", "a", "b", "mix"} <= found
    alone = set(re.findall(r"<text[^>]*>([^<]+)</text>", to_svg(share_chart({"one": shares}, ["a", "b", "mix"]))))
    assert "one" not in alone
    with pytest.raises(BraidError, match="nothing to draw"):
        share_chart({"one": {}}, ["a"])
