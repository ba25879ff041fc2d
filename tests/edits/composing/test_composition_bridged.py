"""Llama and GPT-2 folders as paths: they compute inside the composed model what transformers computes."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_lineage, load_model
from braidlm.edits.compose import compose
from tests.edits.composed_paths import TOKENIZER, ids, own_part, parallel_stage, saved_path

ROWS = 258


def llama(folder, **options):
    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, bos_token_id=256, eos_token_id=256, **options,
    )  # fmt: skip
    return saved(LlamaForCausalLM(config), folder)


def gpt2(folder, **options):
    sizes = {"vocab_size": ROWS, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 4, **options}
    return saved(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=256, eos_token_id=256)), folder)


def saved(model, folder):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.eval().save_pretrained(folder)
    TOKENIZER.save(folder)
    return model


def last_block(model):
    """What a transformers model's last block makes, before its final norm."""
    kept = []
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    handle = layers[-1].register_forward_hook(lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(ids())
    handle.remove()
    return kept[0]


@torch.no_grad()
def parts(folder):
    """Each path's part of what a composed model without full-width blocks makes."""
    model = load_model(folder)
    hidden = model.model.embedding(ids())
    span = model.model.span(hidden)
    hidden = model.model.positions.embed(hidden, span.positions)
    for stage in model.model.stages:
        hidden, _ = stage(hidden, span)
    layer = parallel_stage(model).layers[0]
    return {name: hidden[..., own_part(layer, name)] for name in layer.names}


def test_a_llama_beside_a_model_of_ours(tmp_path):
    theirs = llama(tmp_path / "llama")
    ours = saved_path(tmp_path / "ours", 3)
    out = compose([tmp_path / "llama", ours], tmp_path / "made", join="concat", blocks=0)
    assert (parts(out)["llama"] - last_block(theirs)).abs().max() < 1e-5
    source, other = load_lineage(out)["sources"]
    assert (source["name"], source["format"], other["format"]) == ("llama", "llama", "braid")
    assert [weight["file"] for weight in source["weights"]] == ["model.safetensors"]
    read = source["read_as"]["model.stages.0.layers.2.attention.qkv.weight"]
    assert read == [f"model.layers.2.self_attn.{letter}_proj.weight" for letter in "qkv"]
    assert compose([ours, tmp_path / "llama"], tmp_path / "other", join="gumbel_v1") is not None


def test_two_gpt2(tmp_path):
    """Learned positions side by side, biases, tied heads."""
    models = {name: gpt2(tmp_path / name, n_embd=width) for name, width in (("a", 16), ("b", 24))}
    out = compose([tmp_path / name for name in models], tmp_path / "made", join="concat", blocks=0)
    made = parts(out)
    for name, model in models.items():
        assert (made[name] - last_block(model)).abs().max() < 1e-5
    composed = load_model(out)
    assert composed.head.weight is composed.model.embedding.weight
    tables = [model.transformer.wpe.weight for model in models.values()]
    assert torch.equal(composed.model.positions.weight, torch.cat(tables, dim=1))


def test_a_llama_that_braid_cannot_express(tmp_path):
    llama(tmp_path / "scaled", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    saved_path(tmp_path / "ours", 3)
    with pytest.raises(BraidError, match="Braid cannot express this Llama"):
        compose([tmp_path / "scaled", tmp_path / "ours"], tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_llama_and_a_model_of_ours_are_averaged(tmp_path):
    """The average is checked against what transformers computes with the Llama folder."""
    theirs = llama(tmp_path / "llama")
    ours = saved_path(tmp_path / "ours", 3)
    made = compose([tmp_path / "llama", ours], tmp_path / "made", join="average")
    with torch.no_grad():
        each = [model(ids()).logits.softmax(-1) for model in (theirs, load_model(ours))]
        found = load_model(made)(ids()).logits.exp()
    torch.testing.assert_close(found, sum(each) / 2, rtol=0, atol=1e-5)
