"""GPT-2 in and out: the same logits, the same tensors, and refusals that say why."""

import json

import pytest
import torch
from transformers import GPT2LMHeadModel, GPT2Model

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.folders import load_config, load_lineage, load_model
from braidlm.opening.convert import convert
from tests.bridges.checkpoints import braid, difference, gpt2, reconfigure, rewrite, same_tensors, saved

SHAPES = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "inner size": {"n_inner": 40},
    "one head": {"n_head": 1},
    "gelu": {"activation_function": "gelu"},
    "tanh gelu": {"activation_function": "gelu_pytorch_tanh"},
    "relu": {"activation_function": "relu"},
    "epsilon": {"layer_norm_epsilon": 0.1},
    "upcast attention": {"reorder_and_upcast_attn": True},
    "dropout": {"embd_pdrop": 0.3, "attn_pdrop": 0.2, "resid_pdrop": 0.4},
}
BLOCK = {
    "norm": "layer",
    "attention": {"heads": 4, "bias": True},
    "feed": {"kind": "mlp", "activation": "gelu_new", "bias": True},
}
OURS = {"positions": "learned", "block": BLOCK, "stages": [{"block": {"layers": 2}}]}


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_there_and_back(tmp_path, options):
    theirs = gpt2(**options)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "braid", from_="gpt2")
    assert difference(theirs, load_model(tmp_path / "braid")) <= 1e-5
    convert(tmp_path / "braid", tmp_path / "back", to="gpt2")
    assert same_tensors(tmp_path / "hf", tmp_path / "back")
    assert difference(theirs, GPT2LMHeadModel.from_pretrained(tmp_path / "back")) <= 1e-5


def test_settings_survive_the_round_trip(tmp_path):
    theirs = gpt2(**SHAPES["dropout"], n_inner=40, layer_norm_epsilon=0.01, initializer_range=0.05)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "braid")
    dropout = load_config(tmp_path / "braid").architecture["dropout"]
    assert [dropout[kind] for kind in ("embedding", "attention", "residual")] == [0.3, 0.2, 0.4]
    convert(tmp_path / "braid", tmp_path / "back", to="gpt2")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    assert after == before


def test_old_checkpoints_without_prefix_and_with_stored_masks(tmp_path):
    theirs = gpt2()
    theirs.save_pretrained(tmp_path / "hf")

    def make_old(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(24, 24).tril()[None, None]
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    rewrite(tmp_path / "hf", make_old)
    plan = convert(tmp_path / "hf", tmp_path / "braid")
    assert difference(theirs, load_model(tmp_path / "braid")) <= 1e-5
    assert "not read: 2 x transformer.h.*.attn.bias (the causal mask, which old versions stored)" in plan.notes
    assert "transformer.h.1.attn.masked_bias" in load_lineage(tmp_path / "braid")["ignored"]


def test_a_body_saved_alone_has_the_tied_head(tmp_path):
    theirs = gpt2()
    theirs.transformer.save_pretrained(tmp_path / "hf")
    assert isinstance(GPT2Model.from_pretrained(tmp_path / "hf"), GPT2Model)
    convert(tmp_path / "hf", tmp_path / "braid")
    assert difference(theirs, load_model(tmp_path / "braid")) <= 1e-5


def test_a_tied_head_that_is_stored_all_the_same(tmp_path):
    theirs = gpt2()
    theirs.save_pretrained(tmp_path / "hf")
    rewrite(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    plan = convert(tmp_path / "hf", tmp_path / "equal")
    assert difference(theirs, load_model(tmp_path / "equal")) <= 1e-5
    assert any("a second copy of the embedding" in note for note in plan.notes)
    rewrite(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] * -2}))
    plan = convert(tmp_path / "hf", tmp_path / "other")
    assert any("it is kept, untied" in note for note in plan.notes)
    assert difference(GPT2LMHeadModel.from_pretrained(tmp_path / "hf"), load_model(tmp_path / "other")) <= 1e-5


def test_lineage_names_the_source(tmp_path):
    gpt2().save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "braid")
    convert(tmp_path / "braid", tmp_path / "back", to="gpt2")
    lineage = load_lineage(tmp_path / "braid")
    weights = [{"file": "model.safetensors", "sha256": sha256_of(tmp_path / "hf" / "model.safetensors")}]
    assert lineage["made_by"] == "convert from gpt2"
    assert lineage["sources"] == [{"path": "hf", "format": "gpt2", "weights": weights}]
    out = load_lineage(tmp_path / "back")
    assert out["made_by"] == "convert to gpt2"
    assert out["sources"][0]["weights"][0]["sha256"] == sha256_of(tmp_path / "braid" / "model.safetensors")
    assert out["sources"][0]["lineage"] == lineage


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"activation_function": "silu"}, "activation_function is 'silu'; Braid has gelu, gelu_new, relu"),
        ({"scale_attn_weights": False}, "scale_attn_weights is false"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ({"add_cross_attention": True}, "Braid has no encoder"),
        ({"n_head": 5}, "n_embd (32) is not a multiple of n_head (5)"),
        ({"n_embd": "many"}, "transformers does not accept this configuration"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised (gptq)"),
        ({"model_type": "gpt_neo"}, "this folder holds a 'gpt_neo' model, not a 'gpt2' model"),
    ],
)
def test_what_braid_cannot_express_is_refused(tmp_path, settings, reason):
    gpt2().save_pretrained(tmp_path / "hf")
    reconfigure(tmp_path / "hf", **settings)
    with pytest.raises(BraidError) as error:
        convert(tmp_path / "hf", tmp_path / "braid", from_="gpt2")
    assert reason in str(error.value)
    assert str(tmp_path / "hf") in str(error.value)
    assert not (tmp_path / "braid").exists()


def test_all_reasons_come_at_once(tmp_path):
    gpt2().save_pretrained(tmp_path / "hf")
    reconfigure(tmp_path / "hf", scale_attn_weights=False, activation_function="mish")
    with pytest.raises(BraidError, match=r"Braid cannot express this GPT-2:\n  - activation.*\n  - scale_attn_weights"):
        convert(tmp_path / "hf", tmp_path / "braid")


def test_every_tensor_is_accounted_for(tmp_path):
    gpt2().save_pretrained(tmp_path / "hf")

    def spoil(tensors):
        tensors.pop("transformer.h.0.mlp.c_fc.weight")
        tensors["transformer.h.7.ln_1.weight"] = torch.ones(32)
        tensors["transformer.wpe.weight"] = torch.ones(25, 32)
        tensors["transformer.ln_f.bias"] = torch.ones(32, dtype=torch.int8)

    rewrite(tmp_path / "hf", spoil)
    with pytest.raises(BraidError) as error:
        convert(tmp_path / "hf", tmp_path / "braid")
    text = str(error.value)
    assert "the weights are not those of the GPT-2 that config.json describes" in text
    assert "missing transformer.h.0.mlp.c_fc.weight [32, 128]" in text
    assert "left over transformer.h.7.ln_1.weight [32]" in text
    assert "transformer.wpe.weight is [25, 32], expected [24, 32]" in text
    assert "transformer.ln_f.bias is of type I8" in text
    assert not (tmp_path / "braid").exists()


BORN = {
    "ours": {},
    "untied": {"tie_embeddings": False},
    "several equal stages": {"stages": ["block", {"block": {"layers": 2, "feed": {"kind": "mlp", "hidden": 128}}}]},
    "no biases": {"block": {"norm": {"kind": "layer", "bias": False}, "attention": {"heads": 2}, "feed": "mlp"}},
    "biases in attention only": {"block": {**BLOCK, "feed": {"kind": "mlp", "activation": "relu"}}},
}


@pytest.mark.parametrize("options", BORN.values(), ids=BORN)
def test_models_born_in_braid_become_gpt2(tmp_path, options):
    ours = braid({**OURS, **options}, eos_token_id=3)
    saved(ours, tmp_path / "braid")
    plan = convert(tmp_path / "braid", tmp_path / "hf", to="gpt2")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert difference(ours, theirs) <= 1e-5
    assert theirs.config.eos_token_id == 3
    assert theirs.config.bos_token_id is None
    lacks_biases = "ln_f.bias" in str(plan.notes) or "c_fc.bias" in str(plan.notes)
    assert lacks_biases == ("biases" in next(name for name, value in BORN.items() if value is options))


REFUSED = [
    ({"positions": "rope"}, "positions.kind is rope; GPT-2 has learned"),
    ({"positions": "none"}, "positions.kind is none; GPT-2 has learned"),
    ({"norm": "rms"}, "norm.kind is rms; GPT-2 has layer"),
    ({"block": {**BLOCK, "norm": "rms"}}, "block.norm.kind is rms; GPT-2 has layer"),
    ({"block": {**BLOCK, "feed": "geglu"}}, "block.feed.kind is geglu; GPT-2 has mlp"),
    ({"block": {**BLOCK, "attention": {"heads": 4, "kv_heads": 2}}}, "block.attention.kv_heads is 2; GPT-2 has 4"),
    ({"block": {**BLOCK, "attention": {"heads": 4, "head_dim": 4}}}, "block.attention.head_dim is 4; GPT-2 has 8"),
    ({"block": {**BLOCK, "attention": {"heads": 4, "window": 8}}}, "block.attention.window is 8; GPT-2 has none"),
    (
        {"block": {**BLOCK, "attention": {"heads": 4, "out_projection": False}}},
        "block.attention.out_projection is false; GPT-2 has true",
    ),
    ({"block": {**BLOCK, "attention": {"heads": 4, "experts": 2}}}, "block.attention.experts is {names: 2, "),
    ({"head": {"bias": True}}, "head.bias is true; GPT-2 has false"),
    (
        {"stages": ["block", {"block": {"feed": {"hidden": 64}, "norm": {"eps": 0.1}}}]},
        "stages[1].block.norm.eps is 0.1; GPT-2 has 1.0e-05",
    ),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_gpt2_cannot_express_is_refused(tmp_path, options, reason):
    saved(braid({**OURS, **options}), tmp_path / "braid")
    with pytest.raises(BraidError) as error:
        convert(tmp_path / "braid", tmp_path / "hf", to="gpt2")
    assert "GPT-2 cannot express this model" in str(error.value)
    assert f"  - {reason}" in str(error.value)
    assert not (tmp_path / "hf").exists()


def test_an_export_gives_every_reason_at_once(tmp_path):
    window = {"heads": 4, "kv_heads": 1, "window": 8, "head_dim": 4}
    saved(braid({"stages": ["block"], "block": {"attention": window}, "head": {"bias": True}}), tmp_path / "braid")
    with pytest.raises(BraidError) as error:
        convert(tmp_path / "braid", tmp_path / "hf", to="gpt2")
    words = ("rope", "rms", "swiglu", "window is 8", "kv_heads is 1", "head_dim is 4", "head.bias")
    assert [word for word in words if word not in str(error.value)] == []
