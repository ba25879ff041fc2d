"""Two paths trained apart, with one tokenizer, for the tests that train what is composed of them."""

from pathlib import Path
from typing import Any

import pytest

from braidlm.data.packing.prepare import prepare
from braidlm.edits import matrices
from braidlm.training.train import train
from tests.edits.composed_paths import RECIPE


@pytest.fixture(autouse=True)
def _measured_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks how fast an edited model is, and a median of rounds of many steps takes most of an edit's time."""
    monkeypatch.setattr(matrices, "ROUNDS", 1)
    monkeypatch.setattr(matrices, "STEPS", 2)


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Data sets by name, as a recipe names them."""
    home = tmp_path_factory.mktemp("packed")
    prepare("stories", home / "stories", documents=100, tokenizer="bpe", vocab_size=300, workers=1)
    prepare("maths", home / "maths", documents=100, tokenizer=home / "stories" / "tokenizer", workers=1)
    return {name: {"path": str(home / name), "holdout": 0.05} for name in ("stories", "maths")}


@pytest.fixture(scope="session")
def runs(packed: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Run folders of the two paths."""
    home = tmp_path_factory.mktemp("runs")
    found = []
    for name, data in packed.items():
        recipe = {**RECIPE, "name": name, "out": str(home / name), "data": {"length": 32, "sets": {name: data}}}
        found.append(train(recipe, device="cpu").folder)
    return found
