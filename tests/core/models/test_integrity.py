"""Weights are those that were saved, and hold numbers; whatever else is said by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of, write_json
from braidlm.core.models import integrity
from braidlm.core.models.folders import load_lineage, load_model, save_model
from braidlm.core.reading import read_json
from tests.tiny_models import ToyTokenizer, tiny_model

SQUARE = "model.stages.0.layers.0.attention.out.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_model(), tmp_path_factory.mktemp("good") / "toy", ToyTokenizer(), {"made_by": "a test"})


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "toy"))


def change(folder: Path, name: str, value: Any, recorded: bool) -> None:
    """Replace a tensor by `value` of it; with `recorded`, the lineage knows."""
    weights = load_file(folder / "model.safetensors")
    weights[name] = value(weights[name])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if recorded:
        lineage = read_json(folder / "lineage.json")
        lineage["weights"]["sha256"] = sha256_of(folder / "model.safetensors")
        write_json(folder / "lineage.json", lineage)


def test_changed_weights_are_refused_unless_that_is_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(folder)
    change(folder, SQUARE, lambda matrix: matrix.T.contiguous(), recorded=False)  # of the same shape
    with pytest.raises(BraidError, match=r"model\.safetensors is not the file that lineage\.json records") as caught:
        load_model(folder)
    assert caught.value.where == str(folder)
    assert "BRAID_ALLOW_CHANGED_WEIGHTS=1" in str(caught.value.todo)
    monkeypatch.setenv("BRAID_ALLOW_CHANGED_WEIGHTS", "1")
    load_model(folder)


def test_without_a_record_there_is_nothing_to_compare(folder: Path) -> None:
    change(folder, SQUARE, lambda matrix: matrix.T.contiguous(), recorded=False)
    (folder / "lineage.json").unlink()
    load_model(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_named(folder: Path, value: float) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    change(folder, SQUARE, spoil, recorded=True)
    with pytest.raises(BraidError, match=rf"weights are not finite \(NaN or infinite\): {SQUARE}") as caught:
        load_model(folder)
    assert caught.value.where == str(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_every_type_is_looked_at(dtype: torch.dtype) -> None:
    fine = torch.ones(3).to(dtype)
    assert integrity.not_finite([("fine", fine)]) == []
    if dtype.is_floating_point:
        assert integrity.not_finite([("bad", torch.tensor([1.0, torch.nan]).to(dtype))]) == ["bad"]


def test_a_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(integrity, "sha256_of", lambda path: read.append(path) or sha256_of(path))
    load_model(folder)
    load_model(folder)
    assert len(read) == 1


@pytest.mark.parametrize(
    "lineage",
    [
        {"training": []},
        {"training": {"steps": "many"}},
        {"sources": {}},
        {"sources": [1]},
        {"versions": "new"},
        {"weights": []},
        {"tokenizer": 3},
    ],
    ids=str,
)
def test_a_lineage_of_another_shape_is_refused(folder: Path, lineage: dict[str, Any]) -> None:
    write_json(folder / "lineage.json", lineage)
    with pytest.raises(BraidError, match=r"lineage\.json: '"):
        load_lineage(folder)


def test_what_other_libraries_read_has_no_share_in_a_models_hash(folder: Path) -> None:
    before, data = integrity.model_hash(folder), read_json(folder / "config.json")
    assert data.pop("served_attention")["heads"] > 0
    # As version 0.1 wrote it: runs that began with it know their teachers by this.
    (folder / "config.json").write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    assert integrity.model_hash(folder) == before
    write_json(folder / "config.json", data | {"vocab_size": 1 + data["vocab_size"]})
    assert integrity.model_hash(folder) != before
