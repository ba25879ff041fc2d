"""What holds for every edit: active paths and licences go along, and no model is built without a purpose."""

from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.models.card import licence_of_folder
from braidlm.core.models.folders import load_config, load_model, save_model
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from braidlm.opening.convert import convert
from braidlm.opening.open import open_model
from tests.edits.composed_paths import TOKENIZER, double, ids, saved_path
from tests.edits.small_models import BANKS, model_folder, text_file
from tests.tiny_models import models_built

EDITS: dict[str, dict[str, Any]] = {
    "upcycle": {"experts": 2, "top_k": 1},
    "gate": {},
    "quantize": {},
    "factorize": {"rank": 2},
    "sparsify": {"share": 0.5},
    "withdraw": {"paths": ["c"]},
}
CHANGE_LOGITS = ("quantize", "factorize", "sparsify")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An average of three of which one is switched off."""
    home = tmp_path_factory.mktemp("paths")
    whole = compose([saved_path(home / name, seed) for seed, name in enumerate("abc")], home / "whole", join="average")
    return save_model(load_model(whole, paths=["a", "b"]), home / "some", TOKENIZER, {})


@pytest.mark.parametrize("name", EDITS)
@torch.no_grad()
def test_paths_stay_switched_off(name: str, folder: Path, tmp_path: Path) -> None:
    assert load_config(folder).paths == ["a", "b"]
    out = edit(name, folder, tmp_path / "out", **EDITS[name])
    assert load_config(out).paths == ["a", "b"]
    if name not in CHANGE_LOGITS:
        assert (double(out)(ids()).logits - double(folder)(ids()).logits).abs().max() < 1e-5


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


@pytest.mark.parametrize(
    ("kind", "options", "times"),
    [
        ("share", {"what": "feeds"}, 2),
        ("insert", {"modules": 1}, 3),
        ("gate", {}, 3),
        ("quantize", {}, 3),
        ("prune", {"threshold": 0.0}, 4),
    ],
)
def test_each_model_is_built_for_one_purpose(tmp_path: Path, kind: str, options: dict[str, Any], times: int) -> None:
    """Prune runs its source before the plan too, to measure the use of its modules."""
    folder = model_folder(tmp_path / "m", **({} if kind == "share" else BANKS))
    text = {"text": str(text_file(tmp_path))} if kind == "prune" else {}
    with models_built() as built:
        edit(kind, folder, tmp_path / "out", **options, **text)
    assert len(built) == times


@pytest.mark.parametrize(("join", "times"), [("shared_linear", 3), ("average", 5)])
def test_composing_builds_each_model_for_one_purpose(tmp_path: Path, join: str, times: int) -> None:
    paths = [model_folder(tmp_path / name) for name in ("a", "b")]
    with models_built() as built:
        compose(paths, tmp_path / "out", join=join)
    assert len(built) == times


def test_a_dry_run_builds_the_old_model_and_the_new_one(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", **BANKS)
    with models_built() as built:
        edit("insert", folder, dry_run=True, modules=1)
    assert len(built) == 2
