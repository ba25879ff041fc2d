"""The page of `braid serve` in a real browser, over a real server of tiny models."""

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit
from xml.etree import ElementTree

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need Playwright for Python")
pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("the page's tests need Chromium", allow_module_level=True)

from tests.end_to_end.page_server import SCRIPT, add_record, page_server, save_models, save_run  # noqa: E402

expect = sync_api.expect
AXE = Path(__file__).parent / "axe" / "axe.min.js"
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
           "--disable-component-update", "--disable-sync"]  # fmt: skip
PROMPT = "Once upon a time"
NAMED = f"named {SCRIPT}"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Iterator[str]:
    models = save_models(tmp_path_factory.mktemp("models"))
    with page_server([*models, run.parent]) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


class View:
    """A tab at one address, and what went wrong in it."""

    def __init__(self, context: Any, url: str):
        self.url, self.errors = url, []
        self.page = context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.on("console", lambda told: self.errors.append(told.text) if told.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", self._is_own)

    def _is_own(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:", "about:")):
            self.errors.append(f"request to {request.url}")

    def open(self, **state: Any) -> Any:
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/#{urlencode(state, doseq=True)}")
        return self.page

    @property
    def state(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.page.url).fragment, keep_blank_values=True)


@pytest.fixture
def view(browser: Any, url: str) -> Iterator[View]:
    context = browser.new_context(viewport=WIDE, color_scheme="light", accept_downloads=True, reduced_motion="reduce")
    view = View(context, url)
    yield view
    context.close()
    assert not view.errors


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def downloaded(page: Any, kind: str, within: Any = None) -> bytes:
    with page.expect_download() as download:
        (within or page).get_by_role("button", name=kind, exact=True).first.click()
    return Path(download.value.path()).read_bytes()


def written(page: Any) -> str:
    return str(page.locator(".tokens .text").first.inner_text())


def test_a_text_is_continued_changed_and_shared(view: View) -> None:
    page = view.open(model="paths", max_tokens=12, seed=5)
    page.get_by_label("Prompt").fill(PROMPT)
    button(page, "Continue").click()
    expect(button(page, "Go on")).to_be_visible()
    tokens = page.locator(".token")
    expect(tokens).to_have_count(12)
    first = written(page)
    assert view.state["prompt"] == [PROMPT]
    assert view.state["written"]
    tokens.nth(3).click()
    panel = page.get_by_role("region", name="The most probable tokens here")
    rows = panel.locator("li button.row")
    expect(rows).to_have_count(12)
    before = tokens.nth(2).inner_text()
    taken = rows.nth(5).locator(".name").inner_text()
    rows.nth(5).click()
    expect(button(page, "Go on")).to_be_visible()
    assert 4 <= tokens.count() <= 16
    assert tokens.nth(2).inner_text() == before
    assert tokens.nth(3).inner_text().replace("\n", "").strip() == taken.replace("␣", "").strip()
    assert written(page) != first
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    expect(page.get_by_label("Prompt")).to_have_value(PROMPT)
    expect(button(page, "Go on")).to_be_visible()
    assert downloaded(page, "JSON").startswith(b"{")
    header, *lines = csv.reader(io.StringIO(downloaded(page, "CSV").decode()))
    assert header == ["token", "text", "probability"]
    assert lines


def test_writing_stops(view: View) -> None:
    page = view.open(model="paths", prompt=PROMPT, max_tokens=140)
    page.route("**/v1/completions", lambda route: None)  # a server that takes its time
    button(page, "Continue").click()
    button(page, "Stop").click()
    expect(button(page, "Continue")).to_be_visible()


def test_a_character_of_several_tokens(view: View) -> None:
    """What completes no character has no text yet, and every token keeps its own probability."""

    def event(ids: list[int], text: str, offsets: list[int], shares: list[float]) -> str:
        logprobs = {"text_offset": offsets, "token_logprobs": [math.log(share) for share in shares]}
        return f"data: {json.dumps({'choices': [{'text': text, 'token_ids': ids, 'logprobs': logprobs}]})}\n\n"

    page = view.open(model="paths", prompt=PROMPT)
    sent = [event([5], "", [], []), event([6, 7], "\U0001f600a", [0, 0, 1], [0.5, 0.25, 0.125]), "data: [DONE]\n\n"]
    page.route("**/v1/completions", lambda route: route.fulfill(body="".join(sent), content_type="text/event-stream"))
    button(page, "Continue").click()
    expect(button(page, "Go on")).to_be_visible()
    assert page.locator(".token").all_inner_texts() == ["◦", "\U0001f600", "a"]
    lines = csv.reader(io.StringIO(downloaded(page, "CSV").decode()))
    assert [(token, float(share)) for token, _, share in list(lines)[1:]] == [
        ("5", pytest.approx(0.5)), ("6", pytest.approx(0.25)), ("7", pytest.approx(0.125))]  # fmt: skip


def test_a_chat(view: View) -> None:
    page = view.open(model="paths", max_tokens=8, seed=1)
    page.get_by_text("Chat", exact=True).click()
    page.get_by_label("Your words").fill(f"Hello {SCRIPT}")
    page.get_by_label("Your words").press("Control+Enter")
    expect(button(page, "Answer again")).to_be_enabled()
    expect(page.locator(".messages li")).to_have_count(2)
    expect(page.locator(".messages .user p")).to_have_text(f"Hello {SCRIPT}")


def test_who_goes_where(view: View) -> None:
    page = view.open(view="routes", model="paths", prompt=PROMPT)
    tokens = page.locator(".token")
    expect(tokens).to_have_count(len(PROMPT))
    for name in ("stories", "maths"):
        expect(button(page, name)).to_be_visible()
        expect(page.get_by_role("rowheader", name=name)).to_be_visible()
    tokens.nth(2).hover()
    expect(page.get_by_role("tooltip")).to_contain_text("stories")
    page.mouse.move(0, 0)
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(page.get_by_role("tooltip")).to_contain_text("%")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_have_count(0)
    page.get_by_label("Layer", exact=True).press("ArrowRight")
    assert view.state["layer"] == ["1"]
    page.get_by_label("All layers, row by row").check()
    expect(page.locator(".layer")).to_have_count(2)
    header, *lines = csv.reader(io.StringIO(downloaded(page, "CSV").decode()))
    assert header[:2] == ["layer", "position"]
    assert len(lines) >= 2 * 2 * len(PROMPT)
    assert ElementTree.fromstring(downloaded(page, "SVG")).tag.endswith("svg")
    assert downloaded(page, "PNG").startswith(b"\x89PNG")
    button(page, "maths").click()
    expect(button(page, "maths")).to_have_attribute("aria-pressed", "true")


def test_experts_are_switched_off(view: View) -> None:
    page = view.open(view="routes", model="experts", prompt=PROMPT, rows=1)
    expect(page.locator(".layer")).to_have_count(2)
    page.get_by_role("link", name="Switch a part off").click()
    boxes = page.get_by_role("group", name="Parts", exact=True).get_by_role("checkbox")
    expect(boxes).to_have_count(8)
    boxes.first.uncheck()
    expect(page.get_by_role("heading", name="What changes")).to_be_visible()
    assert len(view.state["off"]) == 1


def test_a_path_is_switched_off_by_keyboard_alone(view: View) -> None:
    page = view.open(view="switch", model="paths", prompt=PROMPT, max_tokens=8, seed=3)
    page.get_by_role("checkbox", name="maths").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("heading", name="Without maths")).to_be_visible()
    button(page, "Write both").focus()
    page.keyboard.press("Enter")
    compared = page.get_by_role("status").filter(has_text=re.compile("texts"))
    expect(compared).to_be_visible()
    expect(page.get_by_role("heading", name="What changes")).to_be_visible()
    changed = page.get_by_role("region", name="What changes", exact=True)
    changed.locator(".token").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(changed.get_by_role("group", name="Most probable at this place").locator("li")).to_have_count(16)
    assert view.state["off"] == ["path:maths"]
    assert downloaded(page, "PNG", changed).startswith(b"\x89PNG")
    texts = page.locator(".texts .text").all_inner_texts()
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    expect(compared).to_be_visible()
    assert page.locator(".texts .text").all_inner_texts() == texts


def test_two_models(view: View) -> None:
    page = view.open(view="two", model="paths", prompt=PROMPT, max_tokens=8)
    page.get_by_label("Right model").select_option("experts")
    button(page, "Write both").click()
    expect(page.get_by_role("heading", name="What changes")).to_be_visible()
    expect(page.locator(".texts .token")).to_have_count(16)
    measured = page.get_by_role("group", name="The text, with what changes")
    left = measured.inner_text()
    page.get_by_text("Right text", exact=True).click()
    expect(measured).not_to_have_text(left)
    page.get_by_text("Prompt alone", exact=True).click()
    expect(measured).to_have_text(PROMPT)
    assert view.state["measured"] == ["prompt"]
    assert view.state["other"] == ["experts"]
    page.get_by_label("Right model").select_option("paths")
    expect(page.get_by_role("heading", name="What changes")).to_have_count(0)


def test_two_models_of_different_tokenizers(view: View) -> None:
    def told(route: Any) -> None:
        models = route.fetch().json()
        models["models"][1]["tokenizer"] = "another"
        route.fulfill(json=models)

    view.page.route("**/braid/models", told)
    page = view.open(view="two", model="paths", other="experts", prompt=PROMPT, max_tokens=4, both=1, seed=1)
    expect(page.get_by_role("status").filter(has_text="texts")).to_be_visible()
    expect(page.get_by_text("different tokenizers")).to_be_visible()
    expect(page.get_by_role("heading", name="What changes")).to_have_count(0)


def test_a_text_as_long_as_the_model_reads(view: View) -> None:
    page = view.open(model="paths", prompt="x" * 150, max_tokens=150, temperature=0)
    button(page, "Continue").click()
    expect(page.get_by_role("status").filter(has_text="The model reads no longer text.")).to_be_visible()
    expect(button(page, "Go on")).to_be_disabled()


def test_a_run_goes_on(view: View, run: Path) -> None:
    page = view.open(view="runs")
    status = page.get_by_role("status").filter(has_text="records")
    expect(status).to_contain_text("6 records, to step 30")
    expect(page.locator(".chart svg .series").first).to_be_visible()
    expect(page.get_by_text("Bits per byte of validation text")).to_be_visible()
    expect(page.locator(".samples blockquote")).to_have_text(f"Once {SCRIPT} upon {SCRIPT}")
    add_record(run, 40)
    expect(status).to_contain_text("8 records, to step 40")
    report = page.get_by_role("link", name=f"Report {SCRIPT}")
    report.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"Report {SCRIPT}")


def test_a_run_before_its_first_checkpoint(view: View) -> None:
    """The page begins with its curves, and becomes one to write on only when it is asked to."""
    told = {"name": "young", "loaded": False, "paths": [], "modules": [], "gates": [], "members": []}
    told |= {"problem": "this run has no checkpoint yet", "run": None}
    view.page.route("**/braid/models", lambda route: route.fulfill(json={"models": [told]}))
    page = view.open()
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs and reports")
    expect(page).to_have_url(re.compile("view=runs"))
    page.get_by_role("link", name="Write", exact=True).click()
    expect(page.get_by_role("alert").filter(has_text="no checkpoint yet")).to_be_visible()
    told["problem"] = None
    expect(page.get_by_label("Prompt")).to_be_visible()


def test_a_lineage(view: View) -> None:
    page = view.open(view="lineage", model=NAMED)
    node = page.locator(".node").first
    expect(node).to_be_visible()
    node.focus()
    page.keyboard.press("Enter")
    expect(node).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("region", name="Facts of what is chosen")).to_be_visible()
    expect(page.get_by_role("region", name="Facts of the model")).to_contain_text("parameters")
    assert ElementTree.fromstring(downloaded(page, "SVG")).tag.endswith("svg")
    assert view.state["node"]


def test_script_is_text(view: View) -> None:
    page = view.open(view="write", model=NAMED, prompt=SCRIPT, written=SCRIPT, max_tokens=4)
    expect(page.locator(".before")).to_have_text(SCRIPT)
    shown = {"lineage": ".node .name, .node title", "runs": ".runs th, .samples, .cards"}
    for name in ("routes", "switch", "lineage", "runs", "two"):
        view.open(view=name, model=NAMED, prompt=SCRIPT, run=SCRIPT, other=SCRIPT, off=[f"path:{SCRIPT}"], node=SCRIPT)
        page.wait_for_load_state("networkidle")
        assert page.locator("img, iframe, object").count() == 0
        expect(page.locator(shown.get(name, "option")).filter(has_text=SCRIPT).first).to_be_attached()
    policy = page.request.get(view.url).headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy


def test_a_hostile_report_reaches_nothing(view: View) -> None:
    page = view.open(view="runs")
    page.get_by_role("link", name="Hostile").click()
    expect(page.locator("p")).to_have_text("null refused")
    assert any("Content Security Policy" in error for error in view.errors)
    view.errors.clear()


def test_light_and_dark(view: View) -> None:
    page = view.open()
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(paper)
    assert dark != light
    turn = page.get_by_role("button", name=re.compile("^Theme"))
    turn.click()
    turn.click()
    assert page.evaluate(paper) == light
    page.reload()
    expect(turn).to_have_accessible_name(re.compile("^Theme: light"))
    assert page.evaluate(paper) == light


def test_errors_are_said(view: View) -> None:
    page = view.open(view="routes", model="paths", prompt="x" * 500)
    expect(page.get_by_role("alert").filter(has_text="160")).to_be_visible()
    page.route("**/braid/tokens", lambda route: route.abort())
    page = view.open(view="write", model="paths", prompt=PROMPT)
    button(page, "Continue").click()
    expect(page.get_by_role("alert").filter(has_text="does not answer")).to_be_visible()
    view.errors = [error for error in view.errors if "Failed to load resource" not in error]


def test_a_server_that_wants_a_key(view: View) -> None:
    def guarded(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "a key is needed"}})

    view.page.route("**/braid/models", guarded)
    page = view.open()
    page.get_by_label("This server wants its API key").fill("secret")
    button(page, "Open").click()
    expect(page.get_by_label("Prompt")).to_be_visible()
    view.errors = [error for error in view.errors if "401" not in error]


MESSAGES = json.dumps([{"role": "user", "content": SCRIPT}, {"role": "assistant", "content": "Yes."}])
STATES = {
    "chat": {"view": "write", "model": "paths", "form": "chat", "messages": MESSAGES},
    "write": {"model": "paths", "prompt": PROMPT, "written": " there was", "shade": 1},
    "routes": {"model": "paths", "prompt": PROMPT, "rows": 1},
    "switch": {"model": "paths", "prompt": PROMPT, "off": ["path:maths"], "both": 1, "seed": 1, "max_tokens": 6},
    "two": {"model": "paths", "other": NAMED, "prompt": PROMPT},
    "runs": {},
    "lineage": {"model": "paths", "node": ""},
}
READY = {"chat": ".messages li", "write": ".token", "routes": ".token", "switch": ".changes", "two": ".changes",
         "runs": ".chart .series", "lineage": ".facts-list"}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_everybody_can_use_it(view: View, name: str) -> None:
    page = view.open(**{"view": name, **STATES[name]})
    page.locator(READY[name]).first.wait_for()
    page.evaluate(AXE.read_text())
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        serious = [
            (one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")
        ]
        assert not serious, theme
    for size in (PHONE, WIDE):
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), size
