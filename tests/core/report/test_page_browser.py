"""A report in a browser: hovered, zoomed, sorted and saved, with no error and no request."""

import csv
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.report.page import html
from braidlm.core.report.report import Lines, Report, Table
from tests.core.report.test_page import NASTY, every_chart

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(__file__).parents[2] / "end_to_end" / "axe" / "axe.min.js"
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Report(NASTY, NASTY, f"{NASTY} wins.")
    steps = list(range(1, 101))
    both = {"train": (steps, [5 / step + 1 for step in steps]), "dense": (steps, [2.0] * 100)}
    loss = Lines(both, "step", "loss", errors={"dense": [None, *[0.25] * 99]})
    made.heading("Loss").chart(loss, name="loss")
    rows = [["a", "0.7 ± 0.1", "1.2M", "8.1s"], ["b", "−0.3", "20k", "1m07s"]]
    rows += [["c", None, "3", "2h01m"], ["d", "12", "1,500", "40.0s"]]
    made.heading("Table").table(Table(["name", "bits", "size", "time"], rows, best=1))
    wide = [f"column {n}" for n in range(8)]
    rows = [["a model", *wide], ["strict_small_1", *wide]]
    made.table(Table(["model", *wide], rows, "What each column has. " * 8))
    for name, chart in every_chart(NASTY).items():
        made.heading(name).chart(chart, NASTY, name)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(made), encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    """The report, opened; at the end there must have been no error, and no request but for the page itself."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    problems: list[str] = []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: (problems.append("a script ran"), dialog.dismiss()))
    opened.on("request", lambda request: problems.append(request.url))
    opened.goto(report.as_uri())
    yield opened
    opened.close()
    allowed = (report.as_uri(), "data:", "blob:")
    assert [problem for problem in problems if not problem.startswith(allowed)] == []


def chart(page: Any, name: str) -> Any:
    return page.locator("figure.picture").nth(["loss", *every_chart()].index(name))


def ticks(figure: Any) -> list[str]:
    return figure.locator("svg[role=img] .tick").all_text_contents()


def test_every_chart_is_drawn_and_shows_texts_as_texts(page: Any) -> None:
    for name in ("loss", *every_chart()):
        assert chart(page, name).locator("svg[role=img]").locator("rect, path, circle").count() > 1, name
        assert chart(page, name).locator(".tools button").all_inner_texts()[-3:] == ["SVG", "PNG", "CSV"]
    assert NASTY in " ".join(chart(page, "bars").locator("text").all_text_contents())
    assert page.locator("figure script").count() == 6, "the data alone"


def test_a_chart_is_hovered(page: Any) -> None:
    figure = chart(page, "loss")
    tip = figure.locator(".tip")
    assert not tip.is_visible()
    figure.locator(".zooms").hover(position={"x": 200, "y": 60})
    assert tip.is_visible()
    assert tip.locator("b").inner_text().startswith("step ")
    assert tip.locator("div").all_inner_texts()[0].startswith("dense")
    box = chart(page, "bars").locator("svg[role=img] rect").first
    box.hover()
    assert chart(page, "bars").locator(".tip output").all_inner_texts() == ["−2"]


def test_a_chart_is_zoomed_by_dragging_and_shown_whole_again(page: Any) -> None:
    figure = chart(page, "loss")
    whole = ticks(figure)
    figure.scroll_into_view_if_needed()
    area = figure.locator(".zooms").bounding_box()
    page.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + 40)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.75, area["y"] + 80, steps=4)
    page.mouse.up()
    assert ticks(figure) != whole
    assert "60" in ticks(figure)
    assert "10" not in ticks(figure)
    figure.get_by_role("button", name="Show all").click()
    assert ticks(figure) == whole
    assert not figure.get_by_role("button", name="Show all").is_visible()


def test_a_chart_is_read_and_zoomed_by_keyboard(page: Any) -> None:
    figure = chart(page, "loss")
    whole = ticks(figure)
    figure.locator(".plot").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert figure.locator(".tip b").inner_text() == "step 2"
    assert figure.locator(".tip output").all_inner_texts() == ["3.5", "2 ± 0.25"]
    page.keyboard.press("+")
    assert ticks(figure) != whole
    page.keyboard.press("Escape")
    assert ticks(figure) == whole


def test_errors_are_a_band_around_their_line(page: Any) -> None:
    band = chart(page, "loss").locator("polygon.band")
    assert band.count() == 1, "one of the two lines has errors"
    assert len(band.get_attribute("points").split()) == 2 * 99
    chart(page, "loss").get_by_role("button", name="dense").click()
    assert band.count() == 0


def test_whole_numbers_have_whole_ticks(page: Any) -> None:
    figure = chart(page, "lines")  # its values are at 1, 2 and 3
    along = figure.locator("svg[role=img] .tick[text-anchor=middle]").all_text_contents()
    assert along == ["1", "2", "3"]


def test_a_series_is_hidden_by_its_name(page: Any) -> None:
    figure = chart(page, "loss")
    assert figure.locator("path.series").count() == 2
    figure.get_by_role("button", name="dense").click()
    assert figure.locator("path.series").count() == 1
    assert figure.get_by_role("button", name="dense").get_attribute("aria-pressed") == "false"
    figure.get_by_role("button", name="dense").press("Enter")
    assert figure.locator("path.series").count() == 2


def test_a_table_is_sorted_by_any_column(page: Any) -> None:
    table = page.locator("main table", has_text="bits").first
    first = table.locator("tbody td:first-child")
    head = table.get_by_role("columnheader", name="bits")
    assert head.get_attribute("aria-sort") is None
    head.get_by_role("button").click()
    assert (head.get_attribute("aria-sort"), first.all_inner_texts()) == ("descending", ["d", "a", "b", "c"])
    head.get_by_role("button").press("Enter")
    assert (head.get_attribute("aria-sort"), first.all_inner_texts()) == ("ascending", ["b", "a", "d", "c"])
    head.get_by_role("button").click()
    assert (head.get_attribute("aria-sort"), first.all_inner_texts()) == (None, ["a", "b", "c", "d"])
    table.get_by_role("columnheader", name="size").get_by_role("button").click()
    assert first.all_inner_texts() == ["a", "b", "d", "c"], "1.2M, 20k, 1,500, 3"
    table.get_by_role("columnheader", name="time").get_by_role("button").click()
    assert first.all_inner_texts() == ["c", "b", "d", "a"], "2h01m, 1m07s, 40.0s, 8.1s"
    assert table.locator("tr.best td").first.inner_text() == "b"


def test_a_chart_is_saved_as_svg_png_and_csv(page: Any) -> None:
    files = {}
    for kind in ("SVG", "PNG", "CSV"):
        with page.expect_download() as download:
            chart(page, "lines").get_by_role("button", name=kind, exact=True).click()
        files[download.value.suggested_filename] = Path(download.value.path()).read_bytes()
    assert list(files) == ["lines.svg", "lines.png", "lines.csv"]
    assert files["lines.png"].startswith(b"\x89PNG")
    drawn = files["lines.svg"].decode()
    assert "&lt;script&gt;" in drawn
    assert "var(" not in drawn, "colours are as they are seen"
    rows = list(csv.reader(io.StringIO(files["lines.csv"].decode(), newline="")))
    assert rows[0] == [NASTY, NASTY, "b", "b, standard error"]
    assert rows[1:] == [["1", "3.5", "", ""], ["2", "", "1", "0.25"], ["3", "2.5", "", ""], ["4", "", "", ""]]


def test_the_theme_is_switched(page: Any) -> None:
    def paper() -> str:
        return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    light = paper()
    switch = page.locator("button.theme")
    switch.click()
    assert paper() == light
    switch.click()
    assert paper() != light
    assert switch.inner_text() == "Dark"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Any, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical", "moderate")] == []


def test_narrow_screens_scroll_tables_and_not_the_page(page: Any) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("document.querySelector('figure.picture svg[role=img]').viewBox.baseVal.width < 400")
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_a_wide_table_says_how_it_goes_on_and_keeps_its_first_column(page: Any) -> None:
    figure = page.locator("figure.wide")
    button, box = figure.locator("button.more"), figure.locator(".scroll")
    assert not button.is_visible()
    page.set_viewport_size({"width": 400, "height": 800})
    button.wait_for()
    assert figure.locator("figcaption").bounding_box()["width"] < 400, "its caption does not scroll"
    before, first = button.inner_text(), box.locator("tbody td").first
    heights = box.locator("tbody tr").evaluate_all("rows => rows.map((row) => row.cells[0].getClientRects()[0].height)")
    assert heights[0] == heights[1], "names are not broken within a word"
    assert "more columns →" in before
    for _ in range(4):
        if "more" not in button.inner_text():
            break
        left = box.evaluate("box => box.scrollLeft")
        button.click()
        page.wait_for_function("([box, left]) => box.scrollLeft > left + 50", arg=[box.element_handle(), left])
        page.wait_for_timeout(400)
    assert button.inner_text() == "← first columns"
    assert first.bounding_box()["x"] < 20
    assert box.locator("tbody td").last.bounding_box()["x"] < 400
    button.click()
    page.wait_for_function("box => box.scrollLeft === 0", arg=box.element_handle())


LONG = "bits per byte on held-out text of everything that was said, lower is better"


@pytest.mark.parametrize("width", [320, 400])
def test_nothing_of_a_chart_is_cut_on_a_phone(browser: Any, tmp_path: Path, width: int) -> None:
    made = Report("Charts")
    marked = Lines({LONG: ([1, 2, 3], [1.0, 2.0, 3.0])}, LONG, LONG, LONG, mark=(2, LONG))
    for name, drawn in {**every_chart(LONG), "marked": marked}.items():
        made.chart(drawn, LONG, name)
    path = tmp_path / "report.html"
    path.write_text(html(made), encoding="utf-8")
    opened = browser.new_page(viewport={"width": width, "height": 800})
    opened.goto(path.as_uri())
    seen = "figure.picture svg text, figure.picture figcaption, figure.picture .legend li, figure.picture .title"
    sides = "one => [one.textContent, one.getBoundingClientRect().left, one.getBoundingClientRect().right]"
    boxes = opened.locator(seen).evaluate_all(f"all => all.map({sides})")
    opened.close()
    assert len(boxes) > 30
    assert [text for text, left, right in boxes if left < 0 or right > width] == []


def test_without_scripts_the_values_are_read(browser: Any, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(report.as_uri())
    figure = opened.locator("figure.picture").first
    assert figure.locator("details table").is_visible()
    assert "21 of 100 points." in figure.inner_text()
    context.close()
