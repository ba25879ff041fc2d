"""Routed blocks: computing the chosen ones only is exactly computing all and hiding, and who reads whom is as said."""

from typing import Any

import pytest
import torch
from routed_models import MASKS, NAMES, TIME, assert_alike, by_all_ways, outcome, routed_model
from torch import Tensor, nn
from transformers import DynamicCache

from braidlm.core.decoding.decoder import Decoder
from braidlm.model.attention.softmax import attentions
from braidlm.model.block import Block
from braidlm.model.config.registry import Choice
from braidlm.model.feed.feeds import feeds
from braidlm.model.modeling_braid import BraidForCausalLM
from tiny_models import random_ids, tiny_model

PLACES = [{"scope": scope, "per": per} for scope in ("all", "routed") for per in ("block", "sublayer")]
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


def shown(options: dict[str, Any]) -> str:
    return " ".join(map(str, options.values()))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("place", PLACES, ids=shown)
def test_sparse_is_all_of_them_hidden(place: dict[str, Any], top_k: int, mask: str) -> None:
    sparse, *others = (outcome(model, MASKS[mask]) for model in by_all_ways({**place, "top_k": top_k}).values())
    assert others
    for other in others:
        assert_alike(sparse, other)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("place", PLACES, ids=shown)
def test_sparse_is_all_of_them_hidden_with_any_parts(place: dict[str, Any], parts: str) -> None:
    sparse, *others = (outcome(model, MASKS["left"]) for model in by_all_ways(place, **PARTS[parts]).values())
    for other in others:
        assert_alike(sparse, other)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("place", PLACES, ids=shown)
def test_sparse_is_all_of_them_hidden_with_any_router(place: dict[str, Any], router: str) -> None:
    models = by_all_ways({**place, **ROUTERS[router]})
    for model in models.values():
        for name, buffer in model.named_buffers():
            if name.endswith("balance"):
                buffer.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    sparse, *others = (outcome(model) for model in models.values())
    for other in others:
        assert_alike(sparse, other)


@pytest.mark.parametrize("positions", ["none", "learned", {"kind": "rope", "pairs": "interleaved"}], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=shown)
def test_sparse_is_all_of_them_hidden_with_any_positions(place: dict[str, Any], positions: Any) -> None:
    sparse, *others = (outcome(model, MASKS["left"]) for model in by_all_ways(place, {"positions": positions}).values())
    for other in others:
        assert_alike(sparse, other)


@pytest.mark.parametrize("positions", ["none", "rope"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("place", PLACES, ids=shown)
def test_sparse_is_all_of_them_hidden_in_long_sequences(place: dict[str, Any], top_k: int, positions: str) -> None:
    models = by_all_ways({**place, "top_k": top_k}, {"positions": positions, "context": 150})
    sparse, *others = (outcome(model, time=150) for model in models.values())
    for other in others:
        assert_alike(sparse, other)


@pytest.mark.parametrize("scope", ["all", "routed"])
def test_deeper_paths_are_the_same_by_all_ways(scope: str) -> None:
    """In scope all a second block needs what the first makes of every token, so there all are computed."""
    paths = {name: {"depth": 4} for name in NAMES}
    models = by_all_ways({"scope": scope}, paths=paths)
    found = {way: outcome(model) for way, model in models.items()}
    for way in ("dense", "plain"):
        assert_alike(found["sparse"], found[way])


@pytest.mark.parametrize("place", PLACES, ids=shown)
def test_a_cache_gives_what_all_of_them_hidden_do(place: dict[str, Any]) -> None:
    models, ids, mask = by_all_ways(place), random_ids(3, TIME), MASKS["left"]
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


@pytest.mark.parametrize("place", PLACES, ids=shown)
def test_activation_checkpointing_changes_nothing(place: dict[str, Any]) -> None:
    models = by_all_ways(place)
    expected = outcome(models["dense"], MASKS["left"])
    models["sparse"].gradient_checkpointing_enable()
    assert_alike(outcome(models["sparse"], MASKS["left"]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=shown)
def test_compiling_changes_nothing(place: dict[str, Any]) -> None:
    """Where rows are counted on the host the graph is in pieces; the numbers are the same."""
    models = by_all_ways(place)
    expected = outcome(models["dense"])
    torch.compiler.reset()
    for layer in models["sparse"].model.stages[0].layers:
        layer.compile(dynamic=False)
    assert_alike(outcome(models["sparse"]), expected)


def alone(bank: nn.Module, kind: Choice, registry: Any, member: int, **options: Any) -> nn.Module:
    """One member of a bank as a module of its own."""
    made = registry.build(kind, 16, **options).double()
    own = {name: tensor[member] for name, tensor in bank.state_dict().items()}
    made.load_state_dict({name: tensor.T if tensor.ndim == 2 else tensor for name, tensor in own.items()})
    return made


@pytest.mark.parametrize("way", ["sparse", "dense"])
@pytest.mark.parametrize("shared", [None, 12])
def test_experts_in_a_block_by_hand(shared: int | None, way: str) -> None:
    router = {"top_k": 2, "compute": way}
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
    found, routings = layer(hidden, span)
    assert [routing.choices for routing in routings] == [("expert_1", "expert_2", "expert_3"), ("a", "b", "c")]

    def mixed(normed: Tensor, part: Any, outputs: list[Tensor]) -> Tensor:
        scores = normed @ part.router.scores.weight.T + part.router.scores.bias
        best = scores.softmax(-1).topk(2)
        weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        return sum(weights[..., i, None] * x for i, x in enumerate(outputs))

    plain = Choice("softmax", attentions["softmax"].Config(heads=4, bias=True))
    normed = layer.attention_norm(hidden)
    parts = [alone(layer.attention.bank, plain, attentions, member) for member in range(3)]
    hidden = hidden + mixed(normed, layer.attention, [part(normed, span)[0] for part in parts])
    normed, plain = layer.feed_norm(hidden), Choice("mlp", feeds["mlp"].Config(hidden=10))
    parts = [alone(layer.feed.bank, plain, feeds, member) for member in range(3)]
    expected = hidden + mixed(normed, layer.feed, [part(normed)[0] for part in parts])
    if shared is not None:
        assert layer.feed.shared.up.weight.shape == (12, 16)
        expected = expected + layer.feed.shared(normed)[0]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("per", ["block", "sublayer"])
@pytest.mark.parametrize(("scope", "reaches"), [("all", True), ("routed", False)])
@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_who_reads_whom(way: str, scope: str, reaches: bool, per: str) -> None:
    """A token that did not choose a block is, in scope routed, not there for those that did."""
    model = routed_model({"scope": scope, "compute": way, "top_k": 1, "per": per}, layers=1)
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
    for way in ("sparse", "dense"):
        join = {"scope": scope, "top_k": top_k, "per": per, "compute": way}
        model = routed_model(join, layers=1, feed={"kind": "mlp", "hidden": 20})
        (layer,) = model.model.stages[0].layers
        block = layer.stack[0] if per == "block" else layer
        feed, attention = (block.feed, block.attention) if per == "block" else (block.feed.bank, block.attention.bank)
        counts = {"up": RowCount(feed.up), "feed out": RowCount(feed.out), "attention out": RowCount(attention.out)}
        with torch.no_grad():
            model(random_ids(3, TIME), use_cache=False)
        counted[way] = {name: count.rows for name, count in counts.items()}
    for name, rows in counted["dense"].items():
        assert rows == 4 * 3 * TIME
        assert counted["sparse"][name] == rows * top_k / 4, name


def test_projections_with_experts_are_the_same_by_both_ways() -> None:
    def made(way: str) -> BraidForCausalLM:
        experts = {"names": 4, "kind": "swiglu", "router": {"top_k": 2, "compute": way, "losses": {}}}
        stages = [{"project": {"to": 8, "bias": True, "experts": experts}}, {"project": {"to": 16, "experts": experts}}]
        return tiny_model(torch.float64, stages=stages)

    assert_alike(outcome(made("sparse"), MASKS["left"]), outcome(made("dense"), MASKS["left"]))


def test_the_routers_losses_are_the_same_by_all_ways() -> None:
    models = by_all_ways({"losses": {"switch": 0.2, "z_loss": 0.1}})
    sparse, *others = (outcome(model, MASKS["right"]) for model in models.values())
    for other in others:
        for name, tensor in other.items():
            torch.testing.assert_close(sparse[name], tensor, rtol=0.0, atol=1e-6)


def test_noise_changes_the_choice_and_not_what_it_counts() -> None:
    model = routed_model({"noise": 5.0, "renormalise": False}).train()
    ids = random_ids(2, TIME)
    torch.manual_seed(0)
    noisy = model(ids).routings[0]
    quiet = model.eval()(ids).routings[0]
    assert not torch.equal(noisy.chosen_BTK, quiet.chosen_BTK)
    torch.testing.assert_close(noisy.probabilities_BTN, quiet.probabilities_BTN)
    torch.testing.assert_close(noisy.weights_BTK, quiet.probabilities_BTN.gather(-1, noisy.chosen_BTK))
