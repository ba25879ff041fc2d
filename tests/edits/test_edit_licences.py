"""The licence of a model goes on to what is made of it: conversions, edits, compositions and further training."""

from pathlib import Path

import pytest

from braidlm.core.models.card import licence_of_folder
from braidlm.edits.compose import compose
from braidlm.opening.convert import convert
from braidlm.opening.open import open_model
from tests.edits.composed_paths import saved_path

CARD = "---\nlicense: {}\n---\n# A model\n"


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    folders = [saved_path(tmp_path / name, seed) for seed, name in enumerate(("stories", "maths"))]
    for folder in folders:
        (folder / "README.md").write_text(CARD.format("mit"))
    return folders


def test_there_and_back_in_another_format(tmp_path: Path, pair: list[Path]) -> None:
    convert(pair[0], tmp_path / "theirs", to="llama")
    assert licence_of_folder(tmp_path / "theirs") == "mit"
    card = (tmp_path / "theirs/README.md").read_text()
    assert "convert to llama" in card
    assert "| stories | - |" in card
    convert(tmp_path / "theirs", tmp_path / "back")
    assert licence_of_folder(tmp_path / "back") == "mit"


def test_a_composed_model_has_the_licence_of_its_paths(tmp_path: Path, pair: list[Path]) -> None:
    compose(pair, tmp_path / "both")
    assert licence_of_folder(tmp_path / "both") == "mit"
    (pair[1] / "README.md").write_text(CARD.format("gpl-3.0"))
    compose(pair, tmp_path / "mixed")
    assert licence_of_folder(tmp_path / "mixed") is None
    assert "What it was made of: stories: mit; maths: gpl-3.0." in (tmp_path / "mixed/README.md").read_text()


def test_a_run_records_the_licence_of_its_start(pair: list[Path]) -> None:
    assert open_model(pair[0]).record()["licence"] == "mit"
    (pair[0] / "README.md").unlink()
    assert "licence" not in open_model(pair[0]).record()
