"""Tests are found by the names of the files that they test, and no folder has more than twenty files."""

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE, TESTS = ROOT / "src" / "braidlm", ROOT / "tests"
OF_NO_FILE = ("compat", "contract", "docs", "end_to_end", "fuzz", "recipes")
"""Folders of tests about many files at once."""
MOST_FILES = 20


def mirrored(test: Path) -> bool:
    """Whether tests/A/test_b.py or test_b_SOMETHING.py has its src/braidlm/A/b.py."""
    place = test.relative_to(TESTS).parent
    _, *words = test.stem.split("_")
    return any((SOURCE / place / f"{'_'.join(words[:n])}.py").is_file() for n in range(1, len(words) + 1))


def test_every_test_mirrors_a_file() -> None:
    tests = [path for path in TESTS.rglob("test_*.py") if path.relative_to(TESTS).parts[0] not in OF_NO_FILE]
    assert len(tests) > 200
    astray = [str(path.relative_to(ROOT)) for path in tests if not mirrored(path)]
    assert not astray, "name these as the file that they test, or move them to tests/end_to_end"


@pytest.mark.parametrize("name", ["training/test_lop.py", "training/test_loopy.py", "core/test_loop.py"])
def test_a_test_of_nothing_is_noticed(name: str) -> None:
    assert mirrored(TESTS / "training" / "test_loop_again.py")
    assert not mirrored(TESTS / name)


@pytest.mark.parametrize("base", [SOURCE, TESTS], ids=["src", "tests"])
def test_no_folder_has_more_than_twenty_files(base: Path) -> None:
    files = [path for path in base.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    crowded = {folder: n for folder, n in Counter(path.parent for path in files).items() if n > MOST_FILES}
    assert not crowded
