"""Documentation that follows from the code is equal to it, and its links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.core.models.presets import config_from
from braidlm.core.recipes import list_recipes
from tests.contract.test_floors import FLOORS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.TARGET.read_text(encoding="utf-8")
    assert written == script.reference(), "run: python docs/generate_reference.py"
    assert "%(" not in written, "argparse fills in such a text only where it prints the help itself"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        other = (page.parent / path) if path else page
        if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_page_of_sizes_has_every_presets_count() -> None:
    text = (ROOT / "docs" / "results" / "sizes.md").read_text(encoding="utf-8")
    for name, _ in list_recipes():
        if name.startswith("models/"):
            counted = model_cost(skeleton(config_from(name, vocab_size=50_257))).parameters
            assert re.search(rf"^\| `{name}` \|.*\| {counted:,} \|", text, re.MULTILINE), f"{name}: {counted:,}"


def sections(page: Path) -> dict[str, list[str]]:
    """The lines of each section of a page, by its heading."""
    _, *parts = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {part.split("\n", 1)[0]: part.rstrip().splitlines() for part in parts}


def test_entries_of_the_log_have_at_most_ten_lines() -> None:
    assert not {title: len(lines) for title, lines in sections(ROOT / "LOG.md").items() if len(lines) > 10}


def test_each_question_of_the_results_fits_on_a_screen() -> None:
    assert not {title: len(lines) for title, lines in sections(ROOT / "docs" / "results.md").items() if len(lines) > 24}


DESCRIBING = [page for page in PAGES if page.name not in ("CHANGELOG.md", "LOG.md") and page.parent.name != "results"]
"""Pages about the code of today; the others say what was true on a day."""


@pytest.mark.parametrize("page", DESCRIBING, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8"))
    named = set(re.findall(r"`((?:src/|tests/|benchmarks/|docs/)?(?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.py)?)`", text))
    places = (ROOT, ROOT / "src" / "braidlm", ROOT / "tests")
    rooms = {path.name for path in (*ROOT.iterdir(), *(ROOT / "src" / "braidlm").iterdir())}
    ours = {name for name in named if name.split("/")[0] in rooms}
    assert not {name for name in ours if not any((place / name).exists() for place in places)}


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md"])
def test_the_floors_of_a_page_are_those_of_the_code(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    listed = re.findall(r"^ *([a-z]+)/ +(\d+)  ", text, re.MULTILINE)
    in_table = [(name, floor) for floor, name in re.findall(r"^\| (\d+) \| `([a-z]+)/` \|", text, re.MULTILINE)]
    assert {name: int(floor) for name, floor in listed + in_table} == FLOORS
