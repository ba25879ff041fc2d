"""Llama in and out: the same logits, the same tensors, and refusals that say why."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model
from braidlm.opening.convert import convert
from tests.bridges.checkpoints import braid, difference, llama, reconfigure, rewrite, same_tensors, saved

SHAPES = {
    "plain": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "attention biases": {"attention_bias": True, "num_key_value_heads": 2},
    "feed biases": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "other head size": {"head_dim": 12, "num_key_value_heads": 2},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "epsilon": {"rms_norm_eps": 0.1},
    "what only training reads": {"attention_dropout": 0.3, "initializer_range": 0.05},
}
OURS = {"block": {"attention": {"heads": 4}}, "stages": [{"block": {"layers": 2}}]}


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_there_and_back(tmp_path, options):
    theirs = llama(**options)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "braid", from_="llama")
    assert difference(theirs, load_model(tmp_path / "braid")) <= 1e-5
    convert(tmp_path / "braid", tmp_path / "back", to="llama")
    assert same_tensors(tmp_path / "hf", tmp_path / "back")
    assert difference(theirs, LlamaForCausalLM.from_pretrained(tmp_path / "back")) <= 1e-5
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    assert {name: value for name, value in after.items() if name not in ("rope_theta", "rope_scaling")} == before


def test_shards(tmp_path):
    theirs = llama(num_key_value_heads=2)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    shards = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) > 1
    convert(tmp_path / "hf", tmp_path / "braid")
    assert difference(theirs, load_model(tmp_path / "braid")) <= 1e-5
    assert [file["file"] for file in load_lineage(tmp_path / "braid")["sources"][0]["weights"]] == shards
    (tmp_path / "hf" / shards[0]).unlink()
    with pytest.raises(BraidError, match=f"of {len(shards)} files of weights 1 are not there: {shards[0]}"):
        convert(tmp_path / "hf", tmp_path / "again")


def test_older_configurations_and_stored_wavelengths(tmp_path):
    theirs = llama(rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    theirs.save_pretrained(tmp_path / "hf")
    reconfigure(tmp_path / "hf", rope_parameters=..., rope_theta=700.0, rope_scaling=None)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path / "hf", lambda tensors: tensors.update({name: torch.ones(4)}))
    convert(tmp_path / "hf", tmp_path / "braid")
    assert difference(theirs, load_model(tmp_path / "braid")) <= 1e-5
    assert list(load_lineage(tmp_path / "braid")["ignored"]) == [name]


def test_what_is_written_has_its_rotations_under_older_names_too(tmp_path):
    """Transformers 4 does not read `rope_parameters`, and would rotate by another theta without a word."""
    scaled = {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0}
    llama(rope_parameters=scaled).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "braid")
    convert(tmp_path / "braid", tmp_path / "back", to="llama")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["rope_theta"] == 700.0
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_become_float32_and_it_is_said(tmp_path, dtype):
    llama().to(dtype).save_pretrained(tmp_path / "hf")
    plan = convert(tmp_path / "hf", tmp_path / "braid")
    assert f"the weights are {str(dtype).removeprefix('torch.')}; they are written as float32" in plan.notes
    # Loaded, not cast back: `.to(dtype)` has rounded the wavelengths, a buffer, too.
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert difference(theirs, load_model(tmp_path / "braid")) <= 1e-5


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; Braid's SwiGLU has silu"),
        (
            {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rotary positions are scaled by 'dynamic'; Braid has linear, llama3, yarn",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads (4) is not a multiple of num_key_value_heads (3)"),
        ({"head_dim": 7}, "an even"),
        ({"model_type": "mistral"}, "this folder holds a 'mistral' model, not a 'llama' model"),
    ],
)
def test_what_braid_cannot_express_is_refused(tmp_path, settings, reason):
    llama().save_pretrained(tmp_path / "hf")
    reconfigure(tmp_path / "hf", **settings)
    with pytest.raises(BraidError) as error:
        convert(tmp_path / "hf", tmp_path / "braid", from_="llama")
    assert reason in str(error.value)
    assert not (tmp_path / "braid").exists()


def test_every_tensor_is_accounted_for(tmp_path):
    llama().save_pretrained(tmp_path / "hf")

    def spoil(tensors):
        tensors.pop("lm_head.weight")
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(43, 32)

    rewrite(tmp_path / "hf", spoil)
    with pytest.raises(BraidError) as error:
        convert(tmp_path / "hf", tmp_path / "braid")
    assert "missing lm_head.weight [67, 32]" in str(error.value)
    assert "left over model.layers.0.self_attn.q_proj.bias [32]" in str(error.value)
    assert "model.layers.1.mlp.up_proj.weight is [43, 32], expected [44, 32]" in str(error.value)


BORN = {
    "ours": {},
    "interleaved pairs": {"positions": {"pairs": "interleaved"}},
    "interleaved, grouped, biased": {
        "positions": {"pairs": "interleaved", "theta": 300.0},
        "block": {"attention": {"heads": 4, "kv_heads": 2, "head_dim": 12, "bias": True}, "feed": {"bias": True}},
    },
    "untied": {"tie_embeddings": False},
    "several equal stages": {"stages": ["block", {"block": {"attention": {"kv_heads": 4, "head_dim": 8}}}, "block"]},
}


@pytest.mark.parametrize("options", BORN.values(), ids=BORN)
def test_models_born_in_braid_become_llama(tmp_path, options):
    ours = braid({**OURS, **options})
    saved(ours, tmp_path / "braid")
    convert(tmp_path / "braid", tmp_path / "hf", to="llama")
    assert difference(ours, LlamaForCausalLM.from_pretrained(tmp_path / "hf")) <= 1e-5
    convert(tmp_path / "hf", tmp_path / "again")
    assert difference(ours, load_model(tmp_path / "again")) <= 1e-5


def test_dropout_that_llama_lacks_is_said(tmp_path):
    saved(braid({**OURS, "dropout": 0.1}), tmp_path / "braid")
    plan = convert(tmp_path / "braid", tmp_path / "hf", to="llama")
    assert any("Llama has dropout in attention only" in note for note in plan.notes)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "hf").config.attention_dropout == 0.1


REFUSED = [
    ({"positions": "learned"}, "positions.kind is learned; Llama has rope"),
    ({"positions": "none"}, "positions.kind is none; Llama has rope"),
    ({"block": {"norm": "layer"}}, "block.norm.kind is layer; Llama has rms"),
    ({"norm": {"eps": 0.1}}, "norm.eps is 0.1; Llama has 1.0e-05"),
    ({"block": {"feed": "mlp"}}, "block.feed.kind is mlp; Llama has swiglu"),
    ({"block": {"feed": {"learned_beta": True}}}, "block.feed.learned_beta is true; Llama has false"),
    ({"block": {"attention": {"window": 8}}}, "block.attention.window is 8; Llama has none"),
    ({"block": {"attention": {"out_projection": False}}}, "block.attention.out_projection is false; Llama has true"),
    ({"block": {"attention": {"heads": 3, "head_dim": 8}}}, "transformers does not accept its configuration"),
    ({"block": {"attention": {"experts": 2}}}, "block.attention.experts is {names: 2, "),
    ({"block": {"feed": {"experts": 2}}}, "block.feed.experts is {names: 2, "),
    ({"head": {"bias": True}}, "head.bias is true; Llama has false"),
    ({"gates": {"kind": "vector", "layers": [1]}}, "gates is {kind: {kind: vector}, layers: [1]}; Llama"),
    (
        {"stages": ["block", {"block": {"feed": "geglu"}}]},
        "stages[1].block.feed.kind is geglu; Llama has swiglu",
    ),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_llama_cannot_express_is_refused(tmp_path, options, reason):
    saved(braid({**OURS, **options}), tmp_path / "braid")
    with pytest.raises(BraidError) as error:
        convert(tmp_path / "braid", tmp_path / "hf", to="llama")
    assert "Llama cannot express this model" in str(error.value)
    assert f"  - {reason}" in str(error.value)
    assert not (tmp_path / "hf").exists()
