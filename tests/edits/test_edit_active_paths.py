"""A folder whose model has some of its paths switched off: an edit of it leaves them so."""

from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.models.folders import load_config, load_model, save_model
from braidlm.edits.compose import compose
from braidlm.edits.edit import edit
from tests.edits.composed_paths import TOKENIZER, double, ids, saved_path

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
