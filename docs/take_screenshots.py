"""The pictures of README.md and docs/serve.md, from the models and reports of a finished demo.

Run: python docs/take_screenshots.py DEMO [CHROMIUM], where `braid demo --out DEMO` has ended. It needs Playwright and
Pillow beside the extra `serve`.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
STORY = "Once upon a time there was a little girl"
MIXED = f"{STORY} who had 3 + 4 = 7 apples."
WIDE, TALL, PHONE = (1100, 700), (1100, 960), (400, 1100)
COLOURS = 128
"""As many as a picture keeps: text and flat colours need no more, and the file is a third as large."""


@dataclass
class Picture:
    """One view of the page, and what is done in it before it is taken."""

    name: str
    state: dict[str, Any]
    ready: str
    """A selector of what is there when the view is complete."""
    then: Callable[[Page], None] = lambda page: None
    size: tuple[int, int] = WIDE
    theme: str = "light"
    settings: dict[str, Any] = field(default_factory=lambda: {"seed": 1, "max_tokens": 40})


def write(page: Page) -> None:
    """Continue the prompt, and look at what else one token could have been."""
    page.get_by_role("button", name="Continue", exact=True).click()
    page.get_by_role("button", name="Go on", exact=True).wait_for()
    page.locator(".token").nth(5).click()
    page.locator(".bars li").first.wait_for()


PICTURES = [
    Picture("write", {"model": "composed", "prompt": STORY}, "textarea", write),
    Picture(
        "routes",
        {"view": "routes", "model": "composed", "prompt": MIXED, "rows": 1},
        ".token",
        lambda page: page.locator(".layer").nth(1).locator(".token").nth(13).hover(),
    ),
    Picture(
        "switch",
        {"view": "switch", "model": "composed", "prompt": STORY, "off": ["path:maths"], "both": 1},
        ".changes",
        size=TALL,
        theme="dark",
    ),
    Picture("runs", {"view": "runs"}, ".runs", lambda page: page.get_by_role("link", name="composed").first.click(),
            size=TALL),
    Picture("lineage", {"view": "lineage", "model": "composed"}, ".node", size=TALL),
    Picture("phone", {"view": "two", "model": "composed", "other": "dense", "prompt": STORY, "both": 1}, ".changes",
            size=PHONE, theme="dark"),
]  # fmt: skip
CHARTS = {"learning-stories.svg": "learning.svg", "routes.svg": "routes.svg"}
"""The charts of the demo's report that README.md shows: the names that a reader saves them by, and theirs there."""


@contextmanager
def served(folder: str) -> Iterator[str]:
    """The address of `braid serve` on a folder."""
    command = [sys.executable, "-m", "braidlm", "serve", folder, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        told = ""
        for line in server.stdout:
            told += line
            if line.startswith("}"):
                break
        try:
            yield json.loads(told)["url"]
        finally:
            server.terminate()


def take(folder: str, chromium: str) -> None:
    """Write all pictures into docs/images."""
    with served(folder) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for picture in PICTURES:
            width, height = picture.size
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=picture.theme, reduced_motion="reduce"
            )
            page.goto(f"{url}#{urlencode({**picture.state, **picture.settings}, doseq=True)}")
            page.locator(picture.ready).first.wait_for()
            picture.then(page)
            page.wait_for_load_state("networkidle")
            image = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            image.save(IMAGES / f"serve-{picture.name}.png", optimize=True)
            page.close()
        page = browser.new_page(viewport={"width": 500, "height": 900}, color_scheme="light")
        page.goto((Path(folder) / "report.html").resolve().as_uri())
        for button in page.get_by_role("button", name="SVG").all():
            with page.expect_download() as download:
                button.click()
            if download.value.suggested_filename in CHARTS:
                download.value.save_as(IMAGES / CHARTS[download.value.suggested_filename])
        browser.close()


if __name__ == "__main__":
    take(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "/usr/bin/chromium")
