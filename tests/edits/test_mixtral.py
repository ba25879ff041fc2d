"""Upcycling Llama and Mistral to Mixtral: plain transformers opens the folder, and it computes what the source does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from braidlm.bridges.checkpoint import Checkpoint
from braidlm.cli.main import main
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.edits import mixtral
from braidlm.edits.edit import edit
from braidlm.edits.mixtral import write_shards
from braidlm.training.decoder import DecoderObjective
from tests.tiny_models import VOCABULARY, ToyTokenizer, random_ids, randomised

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": VOCABULARY - 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 20000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
SOURCES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rms_norm_eps": 1e-3}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama 3's positions": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama, wide heads, gelu": (LlamaForCausalLM, LlamaConfig, {"head_dim": 8, "hidden_act": "gelu"}),
    "mistral, window": (MistralForCausalLM, MistralConfig, {"sliding_window": 4}),
    "mistral, no window, yarn": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "rope_parameters": YARN}),
}


def folder_of(out: Path, name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    model_class, config_class, own = SOURCES[name]
    model = randomised(model_class(config_class(**SIZES, **own, **settings))).to(dtype)
    model.save_pretrained(out)
    ToyTokenizer().save(out)
    return out


@torch.no_grad()
def logits(folder: Path, **options: Any) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()(random_ids(2, 12)).logits


def upcycled(source: Path, out: Path, **options: Any) -> Path:
    folder = edit("upcycle", source, out, **options)
    assert folder is not None
    return folder


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("experts", "top_k"), [(2, 1), (3, 2)])
def test_no_logit_changes(name: str, experts: int, top_k: int, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", name)
    out = upcycled(source, tmp_path / "out", experts=experts, top_k=top_k)
    torch.testing.assert_close(logits(out), logits(source), rtol=0, atol=1e-5)
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert isinstance(config, MixtralConfig)
    assert (config.num_local_experts, config.num_experts_per_tok) == (experts, top_k)


def test_the_files_are_those_that_transformers_writes(tmp_path: Path) -> None:
    """Saving the opened model again gives the same tensors, bit for bit, and the same settings."""
    out = upcycled(folder_of(tmp_path / "source", "mistral, window"), tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "again"))
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    settings, again = (json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "again"))
    assert {key: settings[key] for key in again} == again
    assert set(settings) - set(again) == {"rope_theta", "rope_scaling"}  # for transformers 4


def test_experts_are_copies_and_the_rest_is_the_source(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", "llama", torch.bfloat16)
    out = upcycled(source, tmp_path / "out", experts=3, seed=4)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for own, theirs in names.items():
        for expert in range(3):
            name = f"model.layers.1.block_sparse_moe.experts.{expert}.{theirs}.weight"
            assert torch.equal(after[name], before[f"model.layers.1.mlp.{own}.weight"])
    assert all(torch.equal(before[name], after[name]) for name in before if ".mlp." not in name)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    routers = [after[f"model.layers.{layer}.block_sparse_moe.gate.weight"] for layer in (0, 1)]
    assert routers[0].shape == (3, 16)
    assert not torch.equal(*routers)
    lineage = json.loads((out / "lineage.json").read_text())
    assert lineage["options"] == {"seed": 4, "experts": 3, "top_k": 1, "noise": 0.0, "to": None}
    assert set(lineage["tensors"]) == set(after)
    assert lineage["measured"]["largest_change_of_a_logit"] < 1e-5
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert "license" not in (out / "README.md").read_text()


def test_shards_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of(tmp_path / "source", "llama")
    whole = upcycled(source, tmp_path / "whole")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(sharded, max_shard_size=4000)
    assert len(Checkpoint(sharded).files) > 2
    monkeypatch.setattr(mixtral, "write_shards", lambda *given: write_shards(*given, max_bytes=5000))
    out = upcycled(sharded, tmp_path / "out")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    sizes = [path.stat().st_size for path in out.glob("model-*.safetensors")]
    assert max(sizes) < 5000 + 2000  # with its header
    ours, theirs = Checkpoint(out), Checkpoint(whole)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.stored if ".gate." not in name)
    torch.testing.assert_close(logits(out), logits(source), rtol=0, atol=1e-5)


def test_noise_changes_experts_alone_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "source", "llama")
    out = upcycled(source, tmp_path / "out", noise=0.1)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    matrix = before["model.layers.0.mlp.up_proj.weight"]
    first, second = (after[f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"] for expert in (0, 1))
    assert not torch.equal(first, second)
    for expert in (first, second):
        assert 0.07 < (expert - matrix).std() / matrix.std() < 0.13
    assert all(torch.equal(before[name], after[name]) for name in before if ".mlp." not in name)
    measured = json.loads((out / "lineage.json").read_text())["measured"]["largest_change_of_a_logit"]
    assert measured > 1e-3
    said = capsys.readouterr().out
    assert "predictions change" in said
    assert f"a logit changed by at most {measured:.3g}" in said


def test_a_result_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of(tmp_path / "source", "llama")

    def wrong(folder: Path, tensors: dict[str, Tensor], read: Any) -> None:
        write_shards(folder, tensors, lambda name: read(name) * (1.1 if ".w2." in name else 1.0))

    monkeypatch.setattr(mixtral, "write_shards", wrong)
    with pytest.raises(BraidError, match="promises not to change a logit"):
        edit("upcycle", source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_result_that_does_not_fit_is_written_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("braidlm.core.models.logits.free_memory", lambda device: 100)
    out = upcycled(folder_of(tmp_path / "source", "llama"), tmp_path / "out")
    assert json.loads((out / "lineage.json").read_text())["measured"] == {"logits": "not compared"}
    assert "logits are not compared" in capsys.readouterr().out


def test_a_llama_may_become_a_braid_model(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", "llama", attention_bias=True, mlp_bias=True)
    out = upcycled(source, tmp_path / "out", experts=3, top_k=2, to="braid")
    with torch.no_grad():
        torch.testing.assert_close(load_model(out)(random_ids(2, 12)).logits, logits(source), rtol=0, atol=1e-5)


def test_training_balances_its_experts(tmp_path: Path) -> None:
    """The weight of the one expert is 1, so that the router learns from the balance loss or not at all."""
    model = AutoModelForCausalLM.from_pretrained(upcycled(folder_of(tmp_path / "source", "llama"), tmp_path / "out"))
    ids = random_ids(2, 12)
    losses = DecoderObjective(model)(ids, ids, torch.tensor(ids.numel()))
    router = model.model.layers[0].mlp.gate.weight
    assert losses.routing is not None
    assert torch.autograd.grad(losses.routing, router, retain_graph=True)[0].abs().max() > 1e-8
    assert torch.autograd.grad(losses.text, router)[0].abs().max() < 1e-8
    assert model.eval().generate(ids, max_new_tokens=2).shape == (2, 14)


def test_the_command_shows_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path / "source", "llama")
    assert main(["edit", "upcycle", str(source), "--experts", "4", "--top-k", "2", "--dry-run"]) == 0
    said = capsys.readouterr().out
    dense = sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    feeds, routers = 2 * 3 * 16 * 24, 2 * 4 * 16
    assert f"{dense + 3 * feeds + routers:,} parameters in place of {dense:,}" in said
    assert f"{dense + feeds + routers:,} active per token" in said
    assert "model.layers.*.block_sparse_moe.experts.*.w1.weight" in said
    assert "output_router_logits=True" in said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"attention_bias": True}, r"attention has biases \(attention_bias\)"),
        ({"mlp_bias": True}, r"the feed-forward has biases \(mlp_bias\)"),
    ],
)
def test_what_mixtral_cannot_express_is_refused(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", "llama", **settings)
    with pytest.raises(BraidError, match=text) as error:
        edit("upcycle", source, tmp_path / "out")
    assert "--to braid" in str(error.value.todo)
    assert not (tmp_path / "out").exists()


MODELS: dict[str, tuple[Any, str]] = {
    "sparse already": (MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)), "is sparse already"),
    "an encoder": (
        BertForMaskedLM(BertConfig(vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)),
        "holds a 'bert' model; Braid reads",
    ),
    "another decoder": (
        PhiForCausalLM(PhiConfig(vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)),
        "holds a 'phi' model; Braid reads",
    ),
}


@pytest.mark.parametrize(("model", "text"), MODELS.values(), ids=MODELS)
def test_other_models_are_refused(model: Any, text: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(BraidError, match=text):
        edit("upcycle", tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", "llama")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"model.layers.1.gate.weight": torch.zeros(16)}, source / "model.safetensors")
    with pytest.raises(BraidError, match=r"left over model.layers.1.gate.weight"):
        edit("upcycle", source, tmp_path / "out")
    with pytest.raises(BraidError, match="llama and mistral become Mixtral"):
        edit("upcycle", braid_folder(tmp_path), tmp_path / "out", to="mixtral")
    assert not (tmp_path / "out").exists()


def braid_folder(home: Path) -> Path:
    from braidlm.opening.convert import convert

    shutil.rmtree(home / "source")
    convert(folder_of(home / "source", "llama"), home / "braid")
    return home / "braid"


def test_a_half_precision_header_is_kept(tmp_path: Path) -> None:
    out = upcycled(folder_of(tmp_path / "source", "llama, tied", torch.float16), tmp_path / "out")
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.float16
    assert model.lm_head.weight is model.model.embed_tokens.weight
