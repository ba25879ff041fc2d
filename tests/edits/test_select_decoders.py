"""Selecting gates of a decoder of transformers: an adapter in, an adapter out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, PretrainedConfig

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage
from braidlm.data.tokenizing.build import bytes_tokenizer
from braidlm.edits.edit import edit
from braidlm.model.config.strict import decode
from braidlm.model.gates import GatesConfig
from braidlm.opening.decoder import decoder_by_name
from braidlm.opening.gated_folders import read_adapter, weights_sha256, write_decoder
from braidlm.opening.gating import attach, gates_of, without
from tests.edits.small_models import text_file
from tests.tiny_decoders import save_adapter
from tests.tiny_models import random_ids, randomised

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4}
VOCABULARY = bytes_tokenizer().vocab_size
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=5, n_head=4, n_positions=64),
    "gpt_neox": GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **SIZES),
    "llama": LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, num_key_value_heads=2, **SIZES),
}


@torch.no_grad()
def gated_decoder(home: Path, name: str = "llama", sizes: tuple[float, ...] = (0.0, 0.001, 0.5, 0.4)) -> Path:
    """An adapter of scalar gates of these sizes for layers 2 to 5, and its base beside it."""
    model: Any = randomised(AutoModelForCausalLM.from_config(CONFIGS[name])).eval()
    model.save_pretrained(home / "base")
    bytes_tokenizer().save(home / "base")
    attach(model, decode(GatesConfig, {"kind": "scalar"}))
    for gate, size in zip(gates_of(model).values(), sizes, strict=True):
        gate.weight.fill_(size)
    return save_adapter(model, home / "gates", str(home / "base"), weights_sha256(home / "base"), {"made_by": "test"})


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_with_fewer_gates(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = gated_decoder(tmp_path, name)
    edit("select", source, tmp_path / "out", text=str(text_file(tmp_path)), keep=2)
    assert "Select gates of gates by smallest-change: 2 of 4 go (layers 2 to 3)" in capsys.readouterr().out
    before, after = decoder_by_name(source).load(), decoder_by_name(tmp_path / "out").load()
    assert list(gates_of(after)) == [4, 5]
    assert read_adapter(tmp_path / "out").gates.layers == [4, 5]
    ids = random_ids(2, 20, vocab_size=VOCABULARY)
    with torch.no_grad(), without(before, [2, 3]):
        assert torch.equal(before(ids).logits, after(ids).logits)
    lineage = load_lineage(tmp_path / "out")
    assert lineage is not None
    assert lineage["made_by"] == "braid edit select"
    assert [one["layer"] for one in lineage["measured"]["layers"] if not one["stays"]] == [2, 3]
    assert lineage["sources"][0]["base"]["model"] == "base"


def test_a_gate_that_never_moved_goes_without_changing_a_logit(tmp_path: Path) -> None:
    source = gated_decoder(tmp_path, sizes=(0.0, 0.3, 0.0, 0.4))
    edit("select", source, tmp_path / "out", text=str(text_file(tmp_path)), threshold=0)
    before, after = decoder_by_name(source).load(), decoder_by_name(tmp_path / "out").load()
    assert list(gates_of(after)) == [3, 5]
    ids = random_ids(2, 20, vocab_size=VOCABULARY)
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)


def test_what_is_refused(tmp_path: Path) -> None:
    source, text = gated_decoder(tmp_path, "gpt_neox"), str(text_file(tmp_path))
    with pytest.raises(BraidError, match="a decoder without any gate is a plain one") as error:
        edit("select", source, tmp_path / "out", text=text, keep=0)
    assert str(tmp_path / "base") in str(error.value.todo)
    with pytest.raises(BraidError, match="this model has no gates to select from"):
        edit("select", tmp_path / "base", tmp_path / "out", text=text)
    assert edit("select", source, text=text, dry_run=True) is None
    assert not (tmp_path / "out").exists()


def test_a_base_that_changed_is_refused(tmp_path: Path) -> None:
    source, text = gated_decoder(tmp_path), str(text_file(tmp_path))
    randomised(AutoModelForCausalLM.from_config(CONFIGS["llama"]), seed=5).save_pretrained(tmp_path / "base")
    with pytest.raises(BraidError, match="are not those that these gates were made for"):
        edit("select", source, tmp_path / "out", text=text)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_base_and_gates(tmp_path: Path) -> None:
    gated_decoder(tmp_path, "gpt_neox")
    edit("gate", tmp_path / "base", tmp_path / "full", kind="scalar", full=True)
    model: Any = decoder_by_name(tmp_path / "full").load()
    with torch.no_grad():
        for gate, size in zip(gates_of(model).values(), (0.0, 0.3, 0.0, 0.4), strict=True):
            gate.weight.fill_(size)
    write_decoder(model, tmp_path / "moved")
    bytes_tokenizer().save(tmp_path / "moved")
    edit("select", tmp_path / "moved", tmp_path / "out", text=str(text_file(tmp_path)), threshold=0)
    after = decoder_by_name(tmp_path / "out")
    assert after.is_gated
    assert not after.has_gates
    assert after.tokenizer.vocab_size == VOCABULARY
    loaded = after.load()
    assert list(gates_of(loaded)) == [3, 5]
    ids = random_ids(2, 20, vocab_size=VOCABULARY)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    with pytest.raises(BraidError, match="a decoder without any gate is a plain one"):
        edit("select", tmp_path / "moved", tmp_path / "none", text=str(text_file(tmp_path)), keep=0)


def test_lora_adapters_beside_the_gates_stay(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    source = gated_decoder(tmp_path)
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(source)
    edit("select", source, tmp_path / "out", text=str(text_file(tmp_path)), keep=2)
    opened = decoder_by_name(tmp_path / "out")
    assert opened.has_lora
    before, after = decoder_by_name(source).load(), opened.load()
    ids = random_ids(2, 20, vocab_size=VOCABULARY)
    gone = set(gates_of(before)) - set(gates_of(after))
    assert len(gone) == 2
    with torch.no_grad(), without(before, gone):
        assert torch.equal(before(ids).logits, after(ids).logits)
