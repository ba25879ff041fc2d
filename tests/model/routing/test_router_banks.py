"""Routed blocks: sparse computation equals dense computation, and scope decides which tokens are attended to."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from braidlm.core.decoding.decoder import Decoder
from braidlm.model.attention.attention import attentions
from braidlm.model.config.registry import Choice
from braidlm.model.feed.feeds import feeds
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.stages import Block
from tests.model.routed_models import MASKS, NAMES, TIME, assert_all_close, by_all_methods, outcome, routed_model
from tests.tiny_models import random_ids, tiny_model

JOINS = [{"scope": scope, "per": per} for scope in ("all", "routed") for per in ("block", "sublayer")]
PARTS: dict[str, dict[str, Any]] = {
    "layer norm": {"norm": "layer"},
    "layer norm without bias": {"norm": {"kind": "layer", "bias": False}},
    "biases, gelu": {"feed": {"kind": "mlp", "hidden": 20, "bias": True}, "attention": {"bias": True}},
    "gelu_new": {"feed": {"kind": "mlp", "hidden": 20, "activation": "gelu_new"}},
    "relu": {"feed": {"kind": "mlp", "hidden": 20, "activation": "relu"}},
    "swiglu with biases": {"feed": {"bias": True}},
    "learned beta": {"feed": {"learned_beta": True}},
    "geglu": {"feed": {"kind": "geglu", "hidden": 20, "bias": True}},
    "grouped-query": {"attention": {"kv_heads": 2}},
    "multi-query in a window": {"attention": {"kv_heads": 1, "window": 3}},
    "no output projection": {"attention": {"out_projection": False}},
    "narrow blocks on a wide stream": {"attention": {"heads": 2, "head_dim": 4}, "feed": {"hidden": 12}},
}
ROUTERS: dict[str, dict[str, Any]] = {
    "not renormalised": {"renormalise": False},
    "normed router": {"norm": "rms"},
    "normed router without bias": {"norm": "layer", "bias": False},
    "one block for a token, not renormalised": {"top_k": 1, "renormalise": False},
    "balanced": {"balance_rate": 0.1},
}


def label(options: dict[str, Any]) -> str:
    return " ".join(map(str, options.values()))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("join", JOINS, ids=label)
def test_sparse_equals_dense(join: dict[str, Any], top_k: int, mask: str) -> None:
    sparse, *others = (outcome(model, MASKS[mask]) for model in by_all_methods({**join, "top_k": top_k}).values())
    assert others
    for other in others:
        assert_all_close(sparse, other)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("join", JOINS, ids=label)
def test_sparse_equals_dense_with_any_parts(join: dict[str, Any], parts: str) -> None:
    sparse, *others = (outcome(model, MASKS["left"]) for model in by_all_methods(join, **PARTS[parts]).values())
    for other in others:
        assert_all_close(sparse, other)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("join", JOINS, ids=label)
def test_sparse_equals_dense_with_any_router(join: dict[str, Any], router: str) -> None:
    models = by_all_methods({**join, **ROUTERS[router]})
    for model in models.values():
        for name, buffer in model.named_buffers():
            if name.endswith("balance"):
                buffer.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    sparse, *others = (outcome(model) for model in models.values())
    for other in others:
        assert_all_close(sparse, other)


@pytest.mark.parametrize("positions", ["none", "learned", {"kind": "rope", "pairs": "interleaved"}], ids=str)
@pytest.mark.parametrize("join", JOINS, ids=label)
def test_sparse_equals_dense_with_any_positions(join: dict[str, Any], positions: Any) -> None:
    sparse, *others = (
        outcome(model, MASKS["left"]) for model in by_all_methods(join, {"positions": positions}).values()
    )
    for other in others:
        assert_all_close(sparse, other)


@pytest.mark.parametrize(("top_k", "positions"), [(1, "none"), (2, "rope"), (4, "none")])
@pytest.mark.parametrize("join", JOINS, ids=label)
def test_sparse_equals_dense_in_long_sequences(join: dict[str, Any], top_k: int, positions: str) -> None:
    models = by_all_methods({**join, "top_k": top_k}, {"positions": positions, "context": 150})
    sparse, *others = (outcome(model, time=150) for model in models.values())
    for other in others:
        assert_all_close(sparse, other)


@pytest.mark.parametrize("scope", ["all", "routed"])
def test_deeper_paths_are_the_same_by_all_methods(scope: str) -> None:
    """With scope all, a second block needs the output of the first for every token, so that all are computed."""
    paths = {name: {"depth": 4} for name in NAMES}
    models = by_all_methods({"scope": scope}, paths=paths)
    results = {compute: outcome(model) for compute, model in models.items()}
    for compute in ("dense", "plain"):
        assert_all_close(results["sparse"], results[compute])


@pytest.mark.parametrize("join", JOINS, ids=label)
def test_a_sparse_cache_equals_the_dense_forward(join: dict[str, Any]) -> None:
    models, ids, mask = by_all_methods(join), random_ids(3, TIME), MASKS["left"]
    assert mask is not None
    expected = models.get("plain", models["dense"])(ids, attention_mask=mask, use_cache=False).logits
    cache, done = DynamicCache(), 0
    for piece in ids.split([4, 1, 3, 1], dim=1):
        part = slice(done, done + piece.shape[1])
        done = part.stop
        got = models["sparse"](piece, attention_mask=mask[:, :done], past_key_values=cache).logits
        torch.testing.assert_close(
            got[mask[:, part].bool()], expected[:, part][mask[:, part].bool()], rtol=0, atol=1e-10
        )
    decoder = Decoder(models["sparse"], 1, TIME)
    torch.testing.assert_close(decoder.prefill(ids[:1, :4]), expected[:1, 3], rtol=0, atol=1e-10)
    for at in range(4, TIME):
        torch.testing.assert_close(decoder.step(ids[:1, at]), expected[:1, at], rtol=0, atol=1e-10)


@pytest.mark.parametrize("join", JOINS, ids=label)
def test_activation_checkpointing_changes_nothing(join: dict[str, Any]) -> None:
    models = by_all_methods(join)
    expected = outcome(models["dense"], MASKS["left"])
    models["sparse"].gradient_checkpointing_enable()
    assert_all_close(outcome(models["sparse"], MASKS["left"]), expected)


@pytest.mark.slow
def test_compiling_changes_nothing() -> None:
    """Sparse dispatch reads counts on the host, which breaks the graph; the numbers are the same."""
    models = by_all_methods(JOINS[3], layers=1)
    expected = outcome(models["dense"])
    torch.compiler.reset()
    for layer in models["sparse"].model.stages[0].layers:
        layer.compile(dynamic=False, backend="eager")
    assert_all_close(outcome(models["sparse"]), expected)


def alone(bank: nn.Module, kind: Choice, registry: Any, member: int, **options: Any) -> nn.Module:
    """One member of a bank as a module of its own."""
    module = registry.build(kind, 16, **options).double()
    own = {name: tensor[member] for name, tensor in bank.state_dict().items()}
    module.load_state_dict({name: tensor.T if tensor.ndim == 2 else tensor for name, tensor in own.items()})
    return module


@pytest.mark.parametrize("compute", ["sparse", "dense"])
@pytest.mark.parametrize("shared", [None, 12])
def test_experts_in_a_block_by_hand(shared: int | None, compute: str) -> None:
    router = {"top_k": 2, "compute": compute}
    block = {
        "attention": {"heads": 4, "bias": True, "experts": {"names": 3, "router": router}},
        "feed": {
            "kind": "mlp",
            "hidden": 10,
            "experts": {"names": ["a", "b", "c"], "router": router, "shared": shared},
        },
    }
    model = tiny_model(torch.float64, stages=[{"block": block}])
    (layer,) = model.model.stages[0].layers
    assert isinstance(layer, Block)
    hidden = model.model.embedding(random_ids(2, 6)).detach()
    span = model.model.span(hidden)
    actual, routings = layer(hidden, span)
    assert [routing.choices for routing in routings] == [("expert_1", "expert_2", "expert_3"), ("a", "b", "c")]

    def weighted(normed: Tensor, part: Any, outputs: list[Tensor]) -> Tensor:
        scores = normed @ part.router.scores.weight.T + part.router.scores.bias
        best = scores.softmax(-1).topk(2)
        weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        return sum(weights[..., i, None] * x for i, x in enumerate(outputs))

    plain = Choice("softmax", attentions["softmax"].Config(heads=4, bias=True))
    normed = layer.attention_norm(hidden)
    parts = [alone(layer.attention.bank, plain, attentions, member) for member in range(3)]
    hidden = hidden + weighted(normed, layer.attention, [part(normed, span)[0] for part in parts])
    normed, plain = layer.feed_norm(hidden), Choice("mlp", feeds["mlp"].Config(hidden=10))
    parts = [alone(layer.feed.bank, plain, feeds, member) for member in range(3)]
    expected = hidden + weighted(normed, layer.feed, [part(normed)[0] for part in parts])
    if shared is not None:
        assert layer.feed.shared.up.weight.shape == (12, 16)
        expected = expected + layer.feed.shared(normed)[0]
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("per", ["block", "sublayer"])
@pytest.mark.parametrize(("scope", "reaches"), [("all", True), ("routed", False)])
@pytest.mark.parametrize("compute", ["sparse", "dense"])
def test_scope_decides_which_tokens_are_attended_to(compute: str, scope: str, reaches: bool, per: str) -> None:
    """A token that did not choose a block is, in scope routed, not there for those that did."""
    model = routed_model({"scope": scope, "compute": compute, "top_k": 1, "per": per}, layers=1)
    (layer,) = model.model.stages[0].layers
    hidden = model.model.embedding(random_ids(1, 24)).detach()
    span = model.model.span(hidden)
    before, routings = layer(hidden, span)
    changed = hidden.clone()
    changed[0, 3] *= 1.01
    after, again = layer(changed, span)
    chosen = routings[0].chosen_BTK[0, :, 0]
    assert torch.equal(again[0].chosen_BTK[0, :, 0], chosen), "the change should be too small to move a choice"
    moved = (after - before)[0].abs().amax(-1) > 0
    later = torch.arange(24) > 3
    others, same = later & (chosen != chosen[3]), later & (chosen == chosen[3])
    assert others.any()
    assert same.any()
    assert moved[3]
    assert not moved[:3].any()
    assert moved[same].all(), "those who chose the same block read it"
    assert moved[others].all() if reaches else not moved[others].any()


class RowCount:
    """Counts the rows that a layer of a stack computes."""

    def __init__(self, layer: nn.Module):
        self.rows, self.members = 0, layer.stack
        layer.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sorted_rows = len(args) > 1 or "groups" in kwargs
        self.rows += len(args[0]) if sorted_rows else self.members * args[0][0, ..., 0].numel()


@pytest.mark.parametrize("per", ["block", "sublayer"])
@pytest.mark.parametrize("scope", ["all", "routed"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_sparse_computes_the_chosen_rows_alone(top_k: int, scope: str, per: str) -> None:
    counted = {}
    for compute in ("sparse", "dense"):
        join = {"scope": scope, "top_k": top_k, "per": per, "compute": compute}
        model = routed_model(join, layers=1, feed={"kind": "mlp", "hidden": 20})
        (layer,) = model.model.stages[0].layers
        block = layer.stack[0] if per == "block" else layer
        feed, attention = (block.feed, block.attention) if per == "block" else (block.feed.bank, block.attention.bank)
        counts = {"up": RowCount(feed.up), "feed out": RowCount(feed.out), "attention out": RowCount(attention.out)}
        with torch.no_grad():
            model(random_ids(3, TIME), use_cache=False)
        counted[compute] = {name: count.rows for name, count in counts.items()}
    for name, rows in counted["dense"].items():
        assert rows == 4 * 3 * TIME
        assert counted["sparse"][name] == rows * top_k / 4, name


def test_projections_with_experts_are_the_same_by_both_methods() -> None:
    def model_with(compute: str) -> BraidForCausalLM:
        experts = {"names": 4, "kind": "swiglu", "router": {"top_k": 2, "compute": compute, "losses": {}}}
        stages = [{"project": {"to": 8, "bias": True, "experts": experts}}, {"project": {"to": 16, "experts": experts}}]
        return tiny_model(torch.float64, stages=stages)

    assert_all_close(outcome(model_with("sparse"), MASKS["left"]), outcome(model_with("dense"), MASKS["left"]))


def test_the_routers_losses_are_the_same_by_all_methods() -> None:
    models = by_all_methods({"losses": {"switch": 0.2, "z_loss": 0.1}})
    sparse, *others = (outcome(model, MASKS["right"]) for model in models.values())
    for other in others:
        for name, tensor in other.items():
            torch.testing.assert_close(sparse[name], tensor, rtol=0.0, atol=1e-6)


def test_noise_changes_the_choice_and_not_its_weight() -> None:
    model = routed_model({"noise": 5.0, "renormalise": False}).train()
    ids = random_ids(2, TIME)
    torch.manual_seed(0)
    noisy = model(ids).routings[0]
    evaluated = model.eval()(ids).routings[0]
    assert not torch.equal(noisy.chosen_BTK, evaluated.chosen_BTK)
    torch.testing.assert_close(noisy.probabilities_BTN, evaluated.probabilities_BTN)
    torch.testing.assert_close(noisy.weights_BTK, evaluated.probabilities_BTN.gather(-1, noisy.chosen_BTK))
