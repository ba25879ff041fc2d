"""The model class in transformers: outputs, masks, caches, losses, dropout, initialisation, parameter counts."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton, stage_table
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.dropout import Dropout, scale_dropout
from braidlm.model.heads.losses import next_token_loss, shift_labels
from braidlm.model.members import MembersForCausalLM
from braidlm.model.modeling_braid import BraidForCausalLM, BraidForSequenceClassification, BraidModel
from tests.tiny_models import VOCABULARY, random_ids, tiny_config, tiny_model


@pytest.mark.parametrize(
    "model",
    [BraidModel, BraidForCausalLM, BraidForSequenceClassification, MembersForCausalLM],
    ids=lambda m: m.__name__,
)
def test_the_order_of_its_bases_suits_transformers_4_51(model: type) -> None:
    """There PreTrainedModel is a module first and generates second: a class that has a base that generates before one
    that is a module cannot be made."""

    def class_of_4_51(cls: type) -> type:
        if cls is PreTrainedModel:
            return type(cls.__name__, (nn.Module, GenerationMixin), {})
        if issubclass(cls, PreTrainedModel):
            return type(cls.__name__, tuple(map(class_of_4_51, cls.__bases__)), {})
        return cls

    assert class_of_4_51(model)


def test_outputs_are_tuples_on_request() -> None:
    model, ids = tiny_model(), random_ids(2, 5)
    loss, logits = model(ids, labels=ids, use_cache=False, return_dict=False)
    assert torch.equal(logits, model(ids).logits)
    assert loss.ndim == 0
    assert torch.equal(model.model(ids, use_cache=False, return_dict=False)[0], model.model(ids).last_hidden_state)


def test_embedded_tokens_may_be_given_instead_of_ids() -> None:
    model, ids = tiny_model(), random_ids(2, 5)
    assert torch.equal(model(inputs_embeds=model.model.embedding(ids)).logits, model(ids).logits)


def test_only_the_requested_logits_are_computed() -> None:
    model, ids = tiny_model(), random_ids(2, 5)
    whole = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])


def test_a_cache_is_created_in_evaluation_and_not_in_training() -> None:
    model, ids = tiny_model(), random_ids(1, 4)
    assert isinstance(model(ids).past_key_values, DynamicCache)
    assert model(ids, use_cache=False).past_key_values is None
    assert model.train()(ids).past_key_values is None


def test_beams_are_the_same_with_and_without_a_cache() -> None:
    model, ids = tiny_model(torch.float64), random_ids(2, 4)
    outputs = [
        model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False, use_cache=cached, pad_token_id=0)
        for cached in (True, False)
    ]
    assert torch.equal(*outputs)


def test_a_mask_may_cover_the_new_tokens_alone() -> None:
    model, ids = tiny_model(torch.float64), random_ids(2, 7)
    cache = model(ids[:, :3]).past_key_values
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    got = model(ids[:, 3:], attention_mask=mask, past_key_values=cache).logits
    real = mask.bool()
    torch.testing.assert_close(got[real], model(ids).logits[:, 3:][real], rtol=0, atol=1e-9)


def test_a_mask_of_another_shape_is_refused_and_not_ignored() -> None:
    with pytest.raises(BraidError, match=r"attention_mask must be \[batch, time\].* got 4 dimensions"):
        tiny_model()(random_ids(1, 3), attention_mask=torch.ones(1, 1, 3, 3))


def test_a_static_cache_is_refused_and_not_misread() -> None:
    with pytest.raises(BraidError, match="do not support transformers' static caches") as caught:
        tiny_model().generate(random_ids(1, 3), max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    assert "Leave out cache_implementation" in str(caught.value)


def test_new_tokens_can_be_added(tmp_path: Any) -> None:
    model, ids = tiny_model(), random_ids(1, 5)
    before = model(ids).logits
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    assert model.head.weight is model.model.embedding.weight
    torch.testing.assert_close(model(ids).logits[..., :VOCABULARY], before)
    model.save_pretrained(tmp_path)
    assert BraidForCausalLM.from_pretrained(tmp_path)(ids).logits.shape[-1] == VOCABULARY + 3


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not() -> None:
    tied, untied = tiny_model(), tiny_model(tie_embeddings=False)
    assert tied.head.weight is tied.model.embedding.weight
    assert untied.head.weight is not untied.model.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())


def test_the_base_model_is_part_of_the_language_model() -> None:
    model, ids = tiny_model(), random_ids(2, 5)
    body = BraidModel(model.config).eval()
    body.load_state_dict(model.model.state_dict())
    assert torch.equal(body(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_labels_are_shifted_and_ignored_ones_left_out() -> None:
    logits, labels = torch.randn(2, 4, 7), torch.tensor([[1, 2, -100, 3], [4, -100, -100, 5]])
    assert shift_labels(labels).tolist() == [[2, -100, 3, -100], [-100, -100, 5, -100]]
    shares = logits.log_softmax(-1)
    expected = -(shares[0, 0, 2] + shares[0, 2, 3] + shares[1, 2, 5]) / 3
    torch.testing.assert_close(next_token_loss(logits, shift_labels(labels)), expected)


def test_a_loss_in_pieces_is_the_loss_of_the_whole() -> None:
    logits, labels = torch.randn(4, 6, 7), torch.randint(0, 7, (4, 6))
    labels[0, :4] = -100
    count = float((labels != -100).sum())
    total = sum(next_token_loss(logits[i : i + 1], labels[i : i + 1], count) for i in range(4))
    torch.testing.assert_close(total, next_token_loss(logits, labels))


def test_transformers_count_of_items_is_used() -> None:
    model, ids = tiny_model(), random_ids(2, 5)
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=16).loss * 2, model(ids, labels=ids).loss)


def test_dropout_acts_in_training_at_its_scale() -> None:
    drop, ones = Dropout(0.5), torch.ones(100_000)
    assert torch.equal(drop.eval()(ones), ones)
    drop.train()
    assert drop(ones).eq(0).float().mean().item() == pytest.approx(0.5, abs=0.01)
    drop.scale = 0.2
    dropped = drop(ones)
    assert dropped.eq(0).float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("kind", ["embedding", "attention", "residual"])
def test_each_kind_of_dropout_acts_alone_and_can_be_scaled_away(kind: str) -> None:
    model, ids = tiny_model(dropout={kind: 0.5}), random_ids(2, 8)
    expected = model(ids, use_cache=False).logits
    model.train()
    assert not torch.allclose(model(ids).logits, expected)
    scale_dropout(model, 0.0)
    assert torch.allclose(model(ids).logits, expected)


WIDE = {"width": 128, "block": {"attention": {"heads": 4}, "feed": {"kind": "mlp", "bias": True}}, "norm": "layer"}
WIDE_DEPTH = 2
STDS: dict[str, tuple[dict[str, Any], float, float, float]] = {
    "normal": ({"std": 0.05}, 0.05, 0.05, 0.05),
    "gpt2": ({}, 0.02, 0.02, 0.02 / math.sqrt(2 * WIDE_DEPTH)),
    "small": ({}, math.sqrt(2 / (5 * 128)), math.sqrt(2 / (5 * 128)), 2 / (WIDE_DEPTH * math.sqrt(128))),
    "fan_in": ({"gain": 2.0, "embedding_std": 0.3}, 0.3, 2 / math.sqrt(128), 2 / math.sqrt(128)),
    "torch": ({}, 1.0, 1 / math.sqrt(3 * 128), 1 / math.sqrt(3 * 128)),
}
"""Options, then the standard deviation of the embedding, of qkv, and of attention's output."""


@pytest.mark.parametrize("kind", STDS)
def test_weights_begin_as_the_initialisation_says(kind: str) -> None:
    options, embedding, inner, output = STDS[kind]
    config = tiny_config(400, initialisation={"kind": kind, **options}, positions="learned", **WIDE)
    model = BraidForCausalLM(config)
    block = model.model.stages[0].layers[0]
    weights = [model.model.embedding.weight, block.attention.qkv.weight, block.attention.out.weight]
    for weight, std in zip(weights, (embedding, inner, output), strict=True):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
        assert abs(weight.mean().item()) < 0.05 * std
    assert model.model.positions.weight.std().item() == pytest.approx(embedding, rel=0.05)
    if kind in ("gpt2", "small"):  # the feed-forward writes to the stream too
        assert block.feed.out.weight.std().item() == pytest.approx(output, rel=0.05)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


def test_a_learned_beta_begins_as_swish() -> None:
    feed = {"kind": "swiglu", "hidden": 24}
    plain, learned = (
        BraidForCausalLM(tiny_config(block={"feed": {**feed, "learned_beta": on}})).eval() for on in (False, True)
    )
    learned.load_state_dict(plain.state_dict(), strict=False)
    ids = random_ids(1, 6)
    torch.testing.assert_close(learned(ids).logits, plain(ids).logits)


GPT2_28M = {
    "width": 384,
    "context": 512,
    "positions": "learned",
    "block": {
        "norm": "layer",
        "attention": {"heads": 6, "bias": True},
        "feed": {"kind": "mlp", "activation": "gelu_new", "bias": True},
    },
    "stages": [{"block": {"layers": 12}}],
}


def gpt2_parameters(vocabulary: int, width: int, context: int, layers: int) -> int:
    block = 4 * width * width + 4 * width + 8 * width * width + 5 * width + 4 * width
    return vocabulary * width + context * width + layers * block + 2 * width


def test_counts_are_those_of_the_arithmetic_without_making_the_model() -> None:
    model = skeleton(BraidConfig(GPT2_28M, vocab_size=16_000))
    assert all(p.is_meta for p in model.parameters())
    cost = model_cost(model)
    assert cost.parameters == cost.active_parameters == gpt2_parameters(16_000, 384, 512, 12)
    matrices = 12 * 12 * 384 * 384 + 16_000 * 384
    attention = 12 * 4 * 384 * 513 / 2
    assert cost.flops_per_token == 2 * matrices + attention
    assert [row["name"] for row in stage_table(model)] == ["embedding", "positions", "0: block", "norm", "head"]


def test_a_step_of_training_lowers_the_loss() -> None:
    model, ids = tiny_model().train(), random_ids(8, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.text_loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_autocast_computes_in_its_type_and_stays_close() -> None:
    model, ids = tiny_model(), random_ids(1, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = model(ids).logits
    assert got.dtype == torch.bfloat16
    assert F.cosine_similarity(got.float().flatten(), model(ids).logits.flatten(), dim=0) > 0.99


def test_no_buffer_has_to_be_saved() -> None:
    assert not list(tiny_model().buffers())
    assert not [m for m in tiny_model().modules() if isinstance(m, nn.Dropout)]
