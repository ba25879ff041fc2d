"""Gate adapters: what is saved comes back on the base, and nothing but the base that they were made for will do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from braidlm.core.errors import BraidError
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig
from braidlm.opening.gated_folders import is_adapter, load_adapter, read_adapter, weights_sha256
from braidlm.opening.gating import attach, detach, gates_of
from tests.opening.random_decoders import CONFIGS, DEPTH, open_gates, tiny_decoder, token_ids
from tests.tiny_decoders import save_adapter


def saved(
    tmp_path: Path, name: str = "llama", kind: Any = "vector", layers: list[int] | None = None
) -> PreTrainedModel:
    """A base folder and an adapter folder beside it."""
    model = tiny_decoder(name)
    model.save_pretrained(tmp_path / "base")
    attach(model, decode(GatesConfig, {"kind": kind, "layers": layers}))
    open_gates(gates_of(model))
    base = tmp_path / "base"
    save_adapter(model, tmp_path / "gates", str(base), weights_sha256(base), {"made_by": "a test"})
    return model


def opened(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_comes_back_on_its_base(name: str, tmp_path: Path) -> None:
    ids, model = token_ids(2, 7), saved(tmp_path, name, {"kind": "matrix", "rank": 3, "bias": True}, [2, 4])
    base = opened(tmp_path / "base")
    before, state = base(ids).logits, {key: tensor.clone() for key, tensor in base.state_dict().items()}
    assert is_adapter(tmp_path / "gates")
    assert not is_adapter(tmp_path / "base")
    load_adapter(tmp_path / "gates", base, tmp_path / "base")
    assert list(gates_of(base)) == [2, 4]
    assert torch.equal(base(ids).logits, model(ids).logits)
    detach(base)
    assert torch.equal(base(ids).logits, before)
    assert all(torch.equal(base.state_dict()[key], tensor) for key, tensor in state.items())


def test_the_folder_is_small_and_names_everything(tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "gates" / "gate_config.json").read_text())
    assert config["gates"] == {"kind": {"kind": "vector"}, "layers": list(range(2, DEPTH + 1))}
    assert config["base"] == str(tmp_path / "base")
    assert len(config["base_sha256"]) == 64
    assert list(load_file(tmp_path / "gates" / "gates.safetensors")) == [
        f"model.layers.{index}.gate.weight" for index in range(1, DEPTH)
    ]
    assert {path.name for path in (tmp_path / "gates").iterdir()} == {
        "gate_config.json", "gates.safetensors", "lineage.json", "README.md"
    }  # fmt: skip


def test_a_base_that_changed_since_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    changed = opened(tmp_path / "base")
    with torch.no_grad():
        changed.model.norm.weight[0] += 1
    changed.save_pretrained(tmp_path / "base")
    with pytest.raises(BraidError, match="not those that these gates were made for"):
        load_adapter(tmp_path / "gates", changed, tmp_path / "base")
    assert not gates_of(changed)
    monkeypatch.setenv("BRAID_ALLOW_CHANGED_WEIGHTS", "1")
    load_adapter(tmp_path / "gates", changed, tmp_path / "base")
    assert gates_of(changed)


@pytest.mark.parametrize("options", [{"hidden_size": 32}, {"num_hidden_layers": 3}], ids=str)
def test_gates_for_another_shape_are_refused(options: dict[str, int], tmp_path: Path) -> None:
    saved(tmp_path)
    other = tiny_decoder("llama", **options)
    with pytest.raises(BraidError, match="for another model, of width 16 and 4 layers"):
        load_adapter(tmp_path / "gates", other)
    assert not gates_of(other)


def test_gates_are_not_loaded_on_gates(tmp_path: Path) -> None:
    model = saved(tmp_path)
    with pytest.raises(BraidError, match="has gates already"):
        load_adapter(tmp_path / "gates", model)


def test_a_model_without_gates_has_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(BraidError, match="has no gates"):
        save_adapter(tiny_decoder("llama"), tmp_path / "gates", "base", None, {})
    assert not list(tmp_path.iterdir())


def test_tensors_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "gates" / "gates.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.gate.weight"]
    save_file(tensors, path)
    (tmp_path / "gates" / "lineage.json").unlink()
    base = opened(tmp_path / "base")
    with pytest.raises(BraidError, match=r"missing model\.layers\.2\.gate\.weight"):
        load_adapter(tmp_path / "gates", base)
    assert not gates_of(base)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    base = opened(tmp_path / "base")
    path = tmp_path / "gates" / "gates.safetensors"
    bytes_before = path.read_bytes()
    path.write_bytes(bytes_before[:-4] + b"abcd")
    with pytest.raises(BraidError, match="another SHA-256"):
        load_adapter(tmp_path / "gates", base)
    path.write_bytes(bytes_before[:40])
    with pytest.raises(BraidError, match="damaged"):
        load_adapter(tmp_path / "gates", base)
    (tmp_path / "gates" / "gate_config.json").write_text('{"base": "b", "gates": {"kind": "vectr"}}')
    with pytest.raises(BraidError, match="Did you mean 'vector'"):
        read_adapter(tmp_path / "gates")
