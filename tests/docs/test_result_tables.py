"""Every number in a table of results is in a file of benchmarks/results/, with the command that made it.

The files have many numbers: of numbers of the tables that were changed by 2 to 10%, seven in ten are noticed.
"""

import json
from pathlib import Path

import pytest

from tests.docs.result_tables import RESULTS, Table, recorded, tables

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "results.md", *sorted((DOCS / "results").glob("*.md")), *sorted((DOCS / "papers").glob("*.md"))]
PAGES.remove(DOCS / "papers" / "running.md")  # commands, and what waits for them


def untraced(table: Table) -> set[str]:
    """The numbers of a measured table that its files do not have."""
    found = recorded(table.files)
    return {number for number in table.numbers if not found.has(number)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_table_says_where_its_numbers_are_from(page: Path) -> None:
    """But for the tables of verdicts, whose numbers stand below them."""
    of_numbers = (table for table in tables(page) if table.numbers and "verdict" not in table.rows[0])
    assert not [f"{page.name}:{table.line}" for table in of_numbers if not table.source]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_numbers_are_in_the_files_that_a_table_names(page: Path) -> None:
    """Those that are not are listed with a reason, and nothing else is."""
    for table in tables(page):
        if table.files:
            assert untraced(table) == table.listed, f"{page.name}:{table.line}"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_says_what_made_it(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"date", "hardware"} <= data.keys()
    assert data.keys() & {"command", "commands", "about", "note"}


TABLE = """| model | bits | BLiMP |
| --- | --- | --- |
| gpt2 | 1.378 / *9.99* | {score} |

From `2026-11-15-moep_strict_small-gpu.json`{listed}.
"""


@pytest.mark.parametrize(
    ("score", "listed", "missing"),
    [
        ("66.8", "", set()),
        ("67.9", "", {"67.9"}),
        ("67.9", "; not recorded: 67.9", set()),
        ("66.8", "; not recorded: 5.1", {"5.1"}),
    ],
)
def test_a_wrong_number_is_noticed(tmp_path: Path, score: str, listed: str, missing: set[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(TABLE.format(score=score, listed=listed))
    (table,) = tables(page)
    assert untraced(table) ^ table.listed == missing
