"""The report page: escaped, well formed, and complete in one file."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.core.report.page import PNG, Page

VOID = {"meta", "link", "img", "br", "hr"}
SVG = '<svg viewBox="0 0 1 1"><defs><g id="a"/></defs><use href="#a"/></svg>'
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


def full_page(text: str = "some text") -> Page:
    page = Page(text, text, text)
    page.heading(text).heading(text, 3).text(text).facts({text: text, "count": 1234567})
    page.table([text, "n"], [[text, 1], [text, 2.5]], text, best=1).figure(SVG, text).figure(PNG + b"rest", text)
    return page.quote(text, text, prompt=text).code(text).code(text, summary=text)


def test_everything_is_escaped() -> None:
    outline = Outline(full_page(NASTY).html())
    assert not outline.all("script")
    assert outline.text.count(NASTY) == 21


def test_structure() -> None:
    document = full_page().html()
    outline = Outline(document)
    assert document.startswith("<!DOCTYPE html>")
    for tag in ("html", "head", "title", "body", "header", "h1", "main", "table", "footer", "details"):
        assert len(outline.all(tag)) == 1, tag
    assert outline.all("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in outline.all("meta"))
    assert "prefers-color-scheme: dark" in document
    assert "@media print" in document


def test_loads_nothing_from_elsewhere() -> None:
    document = full_page().html()
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
    outline = Outline(Page("t").links({NASTY: "routes/a b.html", "back": "../report.html"}).html())
    assert [a["href"] for a in outline.all("a")] == ["routes/a%20b.html", "../report.html"]
    assert NASTY in outline.text
    for file in ("https://example.org", "//example.org", "/etc/passwd", "javascript:alert(1)", "\\\\host\\file", ""):
        with pytest.raises(BraidError, match="a page links to files beside it"):
            Page("t").links({"x": file})


def test_a_row_of_the_wrong_length_is_refused() -> None:
    page = Page("t")
    with pytest.raises(BraidError, match=r"table 'Scores': row 1 has 3 cells for 2 columns"):
        page.table(["a", "b"], [[1, 2], [1, 2, 3]], "Scores")
    assert "<table" not in page.html()


def test_tables_show_values_for_people() -> None:
    page = Page("t").table(
        ["name", "n", "share", "mixed", "on"],
        [["a", 12345, "3.1%", "x", True], ["b", None, "−2 ± 0.5", 0.123456, False]],
        best=0,
    )
    document = page.html()
    cells = re.findall(r"<td([^>]*)>(.*?)</td>", document)
    assert [text for _, text in cells] == ["a", "12,345", "3.1%", "x", "yes", "b", "–", "−2 ± 0.5", "0.1235", "no"]
    assert ["number" in kind for kind, _ in cells] == [False, True, True, False, False] * 2
    assert document.count('<tr class="best">') == 1


def test_an_empty_table_keeps_its_columns() -> None:
    assert Page("t").table(["a", "b"], []).html().count("<th ") == 2


def test_paragraphs_code_and_lines() -> None:
    document = Page("t").text("One `braid demo`.\n\nTwo.").quote("line one\nline two", prompt="Once ").html()
    assert "<p>One <code>braid demo</code>.</p>\n<p>Two.</p>" in document
    assert '<span class="prompt">Once </span>line one\nline two</blockquote>' in document


def test_pictures_must_be_what_they_say() -> None:
    page = Page("t")
    with pytest.raises(BraidError, match="must be a PNG"):
        page.figure(b"GIF89a")
    with pytest.raises(BraidError, match="must be an <svg>"):
        page.figure("<img src=x>")


@pytest.mark.parametrize(
    "inside",
    [
        "<script>1</script>",
        '<g onload="x()"/>',
        '<image href="http://example.org/a.png"/>',
        "<image xlink:href='//a.b/c'/>",
        "<style>@import 'https://a.b/c.css'</style>",
        '<g style="fill: url(https://a.b/c)"/>',
    ],
)
def test_an_svg_that_runs_or_loads_is_refused(inside: str) -> None:
    with pytest.raises(BraidError, match="may run and load nothing"):
        Page("t").figure(f"<svg>{inside}</svg>")


def test_headings_have_two_levels() -> None:
    with pytest.raises(BraidError, match="level 2 or 3, not 1"):
        Page("t").heading("x", 1)


def test_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    full_page("déjà vu – ✓").write(path)
    assert path.read_text(encoding="utf-8") == full_page("déjà vu – ✓").html()
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
