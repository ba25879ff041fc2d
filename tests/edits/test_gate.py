"""`braid edit gate`: gates at zero around layers of Braid models and of decoders, and nothing else changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, LlamaConfig, PreTrainedModel

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model, save_model
from braidlm.edits.edit import edit
from braidlm.opening.decoder import decoder_by_name
from braidlm.opening.gating import gates_of
from tests.tiny_models import VOCABULARY, ToyTokenizer, random_ids, tiny_model

STAGES = [{"block": {"layers": 2}}, {"parallel": {"paths": 2, "layers": 2, "join": "routed"}}]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.fixture
def braid(tmp_path: Path) -> Path:
    return save_model(tiny_model(stages=STAGES), tmp_path / "base", ToyTokenizer(), {"made_by": "a test"})


def decoder(folder: Path, config: Any = None) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES)).save_pretrained(folder)
    ToyTokenizer().save(folder)
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(random_ids(2, 9)).logits


@pytest.mark.parametrize(
    ("options", "layers", "parameters"),
    [
        ({}, [2, 3, 4], 3 * 16),
        ({"kind": "scalar", "layers": [4, 1]}, [1, 4], 2),
        ({"kind": "matrix", "bias": True}, [2, 3, 4], 3 * (256 + 16)),
        ({"kind": "matrix", "rank": 3}, [2, 3, 4], 3 * 96),
    ],
    ids=str,
)
def test_a_braid_model_gets_gates(
    braid: Path, options: dict[str, Any], layers: list[int], parameters: int, tmp_path: Path
) -> None:
    edit("gate", braid, tmp_path / "gated", **options)
    before, after = load_model(braid), load_model(tmp_path / "gated")
    assert torch.equal(logits(before), logits(after))
    assert list(gates_of(after)) == layers
    old, new = before.state_dict(), after.state_dict()
    assert sum(tensor.numel() for name, tensor in new.items() if name not in old) == parameters
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items())
    lineage = json.loads((tmp_path / "gated" / "lineage.json").read_text())
    assert lineage["made_by"] == "braid edit gate"
    assert (tmp_path / "gated" / "tokenizer.json").is_file()


@pytest.mark.parametrize("options", [{}, {"kind": "matrix", "rank": 3, "layers": [2]}], ids=str)
@pytest.mark.parametrize("config", [LlamaConfig, GPT2Config], ids=["llama", "gpt2"])
def test_a_decoder_gets_an_adapter(options: dict[str, Any], config: Any, tmp_path: Path) -> None:
    base = decoder(tmp_path / "base", config(**SIZES))
    edit("gate", base, tmp_path / "gates", **options)
    assert not (tmp_path / "gates" / "model.safetensors").exists()
    opened = decoder_by_name(tmp_path / "gates").load()
    assert list(gates_of(opened)) == options.get("layers", [2, 3])
    assert torch.equal(logits(opened), logits(AutoModelForCausalLM.from_pretrained(base)))
    written = json.loads((tmp_path / "gates" / "gate_config.json").read_text())
    assert written["base"] == str(base)
    assert "braid edit gate" in (tmp_path / "gates" / "README.md").read_text()


def test_a_decoder_may_get_a_whole_folder(tmp_path: Path) -> None:
    base = decoder(tmp_path / "base")
    edit("gate", base, tmp_path / "gated", kind="scalar", full=True)
    opened = decoder_by_name(tmp_path / "gated")
    assert torch.equal(logits(opened.load()), logits(AutoModelForCausalLM.from_pretrained(base)))
    assert list(gates_of(opened.load())) == [2, 3]
    assert opened.tokenizer.vocab_size == VOCABULARY
    assert "model.layers.1.gate.weight" in load_file(tmp_path / "gated" / "model.safetensors")


def test_where_the_base_does_not_fit_into_memory_the_gates_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = decoder(tmp_path / "base")

    def refuse(*_: Any) -> None:
        raise BraidError("the model needs 14 GB, and 2 GB are free")

    monkeypatch.setattr("braidlm.edits.gate.check_weights_fit", refuse)
    edit("gate", base, tmp_path / "gates", kind="matrix", rank=2)
    tensors = load_file(tmp_path / "gates" / "gates.safetensors")
    assert not tensors["model.layers.1.gate.weight"].any()
    assert tensors["model.layers.1.gate.down"].any()
    with pytest.raises(BraidError, match="14 GB"):
        edit("gate", base, tmp_path / "full", full=True)
    assert not (tmp_path / "full").exists()


def test_a_dry_run_writes_nothing(braid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = decoder(tmp_path / "llama")
    before = sorted(tmp_path.iterdir())
    edit("gate", braid, dry_run=True)
    edit("gate", base, dry_run=True, kind="matrix")
    shown = capsys.readouterr().out
    assert "layers 2 to 4, 48 parameters" in shown
    assert "layers 2 to 3, 512 parameters" in shown
    assert "model.layers.*.gate.*" in shown
    assert sorted(tmp_path.iterdir()) == before


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"kind": "vectr"}, "Did you mean 'vector'"),
            ({"rank": 3}, "gates of kind 'vector' have no rank"),
            ({"layers": [9]}, "there is no layer 9"),
            ({"layers": [0]}, "from 1 to 1000"),
            ({"kind": "matrix", "rank": 16}, "rank 16"),
        ],
        ids=str,
    )
    def test_options_that_make_no_sense(self, options: dict[str, Any], words: str, braid: Path, tmp_path: Path) -> None:
        base = decoder(tmp_path / "llama")
        for model in (braid, base):
            with pytest.raises(BraidError, match=words):
                edit("gate", model, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("full", [False, True])
    def test_gates_on_gates(self, full: bool, tmp_path: Path) -> None:
        base = decoder(tmp_path / "llama")
        edit("gate", base, tmp_path / "gates", full=full)
        with pytest.raises(BraidError, match="has gates already"):
            edit("gate", tmp_path / "gates", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_gates_on_a_braid_model_with_gates(self, braid: Path, tmp_path: Path) -> None:
        edit("gate", braid, tmp_path / "gates")
        with pytest.raises(BraidError, match="has gates already"):
            edit("gate", tmp_path / "gates", tmp_path / "out")

    def test_an_encoder(self, tmp_path: Path) -> None:
        decoder(tmp_path / "bert", BertConfig(**SIZES))
        with pytest.raises(BraidError, match="this is an encoder"):
            edit("gate", tmp_path / "bert", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_an_adapter_that_was_opened_can_be_trained(tmp_path: Path) -> None:
    base = decoder(tmp_path / "base")
    edit("gate", base, tmp_path / "gates", kind="matrix")
    model: PreTrainedModel = decoder_by_name(tmp_path / "gates").load()
    assert not torch.equal(_after_one_step(model), logits(AutoModelForCausalLM.from_pretrained(base)))


def _after_one_step(model: PreTrainedModel) -> torch.Tensor:
    ids = random_ids(2, 9)
    parameters = [parameter for gate in gates_of(model).values() for parameter in gate.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return logits(model)


def test_a_path_may_be_called_gate(tmp_path: Path) -> None:
    paths = {"layers": 3, "paths": ["gate", "other"], "stacked": False, "join": "add"}
    source = save_model(tiny_model(stages=[{"parallel": paths}]), tmp_path / "source", ToyTokenizer(), {})
    assert list(gates_of(load_model(edit("gate", source, tmp_path / "gated")))) == [2, 3]
