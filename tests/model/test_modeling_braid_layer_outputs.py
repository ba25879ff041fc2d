"""Hidden states and attentions of every layer, and eager attention, as transformers' users know them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.model.modeling_braid import BraidForCausalLM, BraidForSequenceClassification
from braidlm.opening.convert import convert
from tests.tiny_models import random_ids, randomised, tiny_config, tiny_model


def routed_paths(stacked: bool = True, **join: Any) -> dict[str, Any]:
    join = {"kind": "routed", "top_k": 1, **join}
    return {"stages": [{"parallel": {"layers": 2, "paths": 3, "stacked": stacked, "join": join}}]}


MODELS: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "blocks": ({"stages": ["block", {"block": {"layers": 2}}]}, [16] * 4, [4] * 3),
    "shared keys": ({"block": {"attention": {"heads": 4, "kv_heads": 2}}}, [16] * 3, [4] * 2),
    "window": ({"block": {"attention": {"heads": 4, "window": 3}}}, [16] * 3, [4] * 2),
    "narrowed": (
        {
            "stages": [
                "block",
                {"project": {"to": 8}},
                {"parallel": {"paths": 2, "layers": 2}},
                {"project": {"to": 16}},
                "block",
            ]
        },
        [16, 16, 8, 8, 16],
        [4, 8, 8, 4],
    ),
    "paths of two shapes": (
        {
            "stages": [
                {"parallel": {"paths": {"a": {"width": 8}, "b": {"attention": {"heads": 2}}}, "layers": 2}},
                "block",
            ]
        },
        [16] * 4,
        [6, 6, 4],
    ),
    "paths of two depths": (
        {"stages": [{"parallel": {"paths": {"a": {"depth": 2}, "b": {"depth": 1}}, "layers": 3}}]},
        [16] * 4,
        [0, 4, 8],
    ),
    "routed paths": (routed_paths(), [16] * 3, [12] * 2),
    "routed scope": (routed_paths(scope="routed"), [16] * 3, [12] * 2),
    "routed scope, one by one": (routed_paths(stacked=False, scope="routed"), [16] * 3, [12] * 2),
    "per sublayer": (routed_paths(per="sublayer"), [16] * 3, [12] * 2),
    "attention experts": ({"block": {"attention": {"heads": 4, "experts": 3}}}, [16] * 3, [12] * 2),
}
"""Architecture, the width of every hidden state, and the number of heads of every layer."""


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[BraidForCausalLM, list[int], list[int]]:
    architecture, widths, heads = MODELS[request.param]
    return tiny_model(torch.float64, **architecture), widths, heads


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_hidden_states_are_the_embedding_and_the_stream_after_each_layer(case: Any) -> None:
    model, widths, _ = case
    ids = random_ids(2, 5)
    output = model(ids, output_hidden_states=True)
    assert [states.shape for states in output.hidden_states] == [(2, 5, width) for width in widths]
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(output.hidden_states[0], model.model.embedding(ids))
    assert torch.equal(model.head(output.hidden_states[-1]), output.logits)
    stage, after = model.model.stages[0], output.hidden_states[1]
    close(stage.layers[0](output.hidden_states[0], model.model.span(output.hidden_states[0]))[0], after)
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == len(widths)
    assert model(ids, output_hidden_states=False).hidden_states is None


def test_attentions_have_the_heads_of_every_layer_and_change_nothing(case: Any) -> None:
    model, _, heads = case
    ids = random_ids(2, 7)
    output = model(ids, output_attentions=True)
    close(output.logits, model(ids).logits)
    assert [weights.shape[:3] for weights in output.attentions] == [(2, count, 7) for count in heads]
    for weights in filter(torch.numel, output.attentions):
        sums = weights.sum(-1)
        close(sums, (sums > 0).double())  # a path that sees routed tokens alone attends to nothing for others
        assert (sums > 0).any(1).all()
        assert not weights.triu(1).any()
    assert model(ids).attentions is None


def test_all_tokens_are_seen_unless_the_scope_is_routed() -> None:
    model, ids = tiny_model(torch.float64, **routed_paths()), random_ids(2, 7)
    for weights in model(ids, output_attentions=True).attentions:
        close(weights.sum(-1), torch.ones(2, 12, 7, dtype=torch.float64))
    model = tiny_model(torch.float64, **routed_paths(scope="routed"))
    output = model(ids, output_attentions=True)
    for weights, routing in zip(output.attentions, output.routings, strict=True):
        chosen = torch.nn.functional.one_hot(routing.chosen_BTK[..., 0], 3).repeat_interleave(4, -1)
        close(weights.sum(-1), chosen.transpose(1, 2).double())


def test_attentions_of_new_tokens_reach_back_into_the_cache(case: Any) -> None:
    model, _, heads = case
    ids = random_ids(2, 7)
    whole = model(ids, output_attentions=True).attentions
    cache = model(ids[:, :4]).past_key_values
    new = model(ids[:, 4:], past_key_values=cache, output_attentions=True).attentions
    for of_all, of_new, count in zip(whole, new, heads, strict=True):
        if count:
            close(of_new, of_all[:, :, 4:])


def test_eager_attention_gives_the_same_numbers(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = case
    ids, mask = random_ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    expected = model(ids).logits, model(ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", None)
    close(model(ids).logits, expected[0])
    close(model(ids, attention_mask=mask).logits, expected[1])


def test_eager_attention_has_the_same_gradients() -> None:
    model, ids = tiny_model(torch.float64, block={"attention": {"heads": 4, "kv_heads": 2}}), random_ids(2, 7)
    gradients = []
    for kind in ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for fast, eager in zip(*gradients, strict=True):
        close(fast, eager)


def test_a_long_routed_sequence_is_eager_too() -> None:
    """Compact attention begins at 128 tokens."""
    model = tiny_model(torch.float64, context=200, **routed_paths(compute="sparse"))
    ids = random_ids(1, 150)
    expected = model(ids).logits
    model.set_attn_implementation("eager")
    close(model(ids).logits, expected)


def test_a_folder_opens_with_eager_attention_and_generates_with_both_outputs(tmp_path: Path) -> None:
    stages = [{"parallel": {"paths": {"a": {"width": 8}, "b": {}}, "layers": 2}}]
    tiny_model(stages=stages).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    options = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    output = model.generate(random_ids(1, 4), max_new_tokens=3, do_sample=False, pad_token_id=0, **options)
    assert [len(step) for step in output.hidden_states] == [3] * 3
    assert [[weights.shape[-1] for weights in step] for step in output.attentions] == [[4, 4], [5, 5], [6, 6]]


@pytest.mark.parametrize("kind", ["flash_attention_2", "flex_attention"])
def test_other_attentions_are_refused(tmp_path: Path, kind: str) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises((ValueError, ImportError), match=r"(?i)flash|flex"):
        BraidForCausalLM.from_pretrained(tmp_path, attn_implementation=kind)


def test_a_cache_made_from_the_configuration_serves_every_attention() -> None:
    """transformers makes it with one layer for each of `num_hidden_layers`; two paths of two shapes need two."""
    stages = [{"parallel": {"paths": {"a": {"width": 8}, "b": {}}, "layers": 2}}]
    model, ids = tiny_model(torch.float64, stages=stages), random_ids(2, 6)
    cache = DynamicCache(config=model.config)
    model(ids[:, :3], past_key_values=cache)
    close(model(ids[:, 3:], past_key_values=cache).logits, model(ids).logits[:, 3:])
    assert (len(cache.layers), model.config.num_hidden_layers) == (4, 2)


def test_a_classifier_shows_them_too() -> None:
    model = randomised(BraidForSequenceClassification(tiny_config())).eval()
    output = model(random_ids(2, 5), output_attentions=True, output_hidden_states=True)
    assert (len(output.attentions), len(output.hidden_states)) == (2, 3)


def test_attention_without_weights_says_so() -> None:
    model = tiny_model()
    model.model.stages[1].layers[0].attention.records_weights = False
    with pytest.raises(BraidError, match="SoftmaxAttention has no attention weights to show") as caught:
        model(random_ids(1, 3), output_attentions=True)
    assert "stages.1.layers.0.attention" in str(caught.value)


def test_checkpointed_layers_record_once() -> None:
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    ids = random_ids(2, 5)
    output = model(ids, labels=ids, output_attentions=True, output_hidden_states=True)
    output.loss.backward()
    assert (len(output.attentions), len(output.hidden_states)) == (2, 3)


def test_both_are_those_of_the_same_model_in_transformers(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=37, n_positions=24, n_embd=16, n_layer=3, n_head=4, attn_implementation="eager")
    theirs = randomised(GPT2LMHeadModel(config)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "braid")
    ids, both = random_ids(2, 9), {"output_attentions": True, "output_hidden_states": True}
    expected, got = theirs(ids, **both), load_model(tmp_path / "braid")(ids, **both)
    for name in ("hidden_states", "attentions"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
