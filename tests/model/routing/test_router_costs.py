"""Costs of routed models: parameters, active parameters and FLOPs, against sums by hand and MoEP's own counts."""

from typing import Any

import pytest

from braidlm.core.models.accounting import Cost, cost_of, model_cost, skeleton
from braidlm.model.config.braid_config import BraidConfig
from tests.tiny_models import tiny_config

W, HEADS, SIZE, HIDDEN, P, LENGTH = 16, 2, 4, 20, 4, 10
INNER = HEADS * SIZE
ATTENTION = {"heads": HEADS, "head_dim": SIZE, "bias": True}
FEED = {"kind": "mlp", "hidden": HIDDEN, "bias": True}
ROUTER = W * P + P
QUERIES, KEYS_VALUES, OUT, FEEDS = W * INNER, 2 * W * INNER, INNER * W, 2 * W * HIDDEN
"""Weights of one block."""
BIASES = 3 * INNER + W + HIDDEN + W
NORMS = 2 * W
SCORES = 4 * INNER * (LENGTH + 1) // 2


def stage_cost(stage: dict[str, Any]) -> Cost:
    return cost_of(skeleton(tiny_config(stages=[stage])).model.stages[0], LENGTH)


def routed(top_k: int, scope: str, **options: Any) -> Cost:
    join = {"kind": "routed", "top_k": top_k, "scope": scope, **options.pop("join", {})}
    return stage_cost({"parallel": {"paths": P, "join": join, "attention": ATTENTION, "feed": FEED, **options}})


@pytest.mark.parametrize("scope", ["all", "routed"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_routed_block_by_hand(top_k: int, scope: str) -> None:
    cost = routed(top_k, scope)
    block = QUERIES + KEYS_VALUES + OUT + FEEDS + BIASES + NORMS
    assert cost.parameters == P * block + ROUTER
    assert cost.active_parameters == top_k * block + ROUTER
    read = P if scope == "all" else top_k
    products = top_k * (QUERIES + OUT + FEEDS) + read * KEYS_VALUES + W * P
    assert cost.flops_per_token == 2 * products + top_k * SCORES


@pytest.mark.parametrize("scope", ["all", "routed"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_routed_sublayers_by_hand(top_k: int, scope: str) -> None:
    cost = routed(top_k, scope, join={"per": "sublayer"})
    parts = QUERIES + KEYS_VALUES + OUT + FEEDS + BIASES
    assert cost.parameters == P * parts + 2 * ROUTER + NORMS
    assert cost.active_parameters == top_k * parts + 2 * ROUTER + NORMS
    read = P if scope == "all" else top_k
    products = top_k * (QUERIES + OUT + FEEDS) + read * KEYS_VALUES + 2 * W * P
    assert cost.flops_per_token == 2 * products + top_k * SCORES


def test_a_module_for_each_path_computes_all_of_them() -> None:
    sparse, plain = routed(2, "all"), routed(2, "all", stacked=False)
    assert plain.parameters == sparse.parameters
    assert plain.flops_per_token == routed(4, "all").flops_per_token


def test_experts_in_a_block_by_hand() -> None:
    experts = {"names": P, "router": {"top_k": 1}}
    cost = stage_cost({"block": {"attention": ATTENTION, "feed": {**FEED, "experts": {**experts, "shared": 8}}}})
    attention = QUERIES + KEYS_VALUES + OUT + 3 * INNER + W
    one, shared = FEEDS + HIDDEN + W, 2 * W * 8 + 8 + W
    assert cost.parameters == attention + P * one + ROUTER + shared + NORMS
    assert cost.active_parameters == attention + one + ROUTER + shared + NORMS
    assert cost.flops_per_token == 2 * (QUERIES + KEYS_VALUES + OUT + FEEDS + W * P + 2 * W * 8) + SCORES
    cost = stage_cost({"block": {"attention": {**ATTENTION, "experts": experts}, "feed": FEED}})
    assert cost.parameters == P * attention + ROUTER + one + NORMS
    assert cost.active_parameters == attention + ROUTER + one + NORMS
    assert cost.flops_per_token == 2 * (QUERIES + P * KEYS_VALUES + OUT + FEEDS + W * P) + SCORES


def moep(feed: dict[str, Any], projection: dict[str, Any]) -> BraidConfig:
    """The paper's sizes: 16,384 tokens, 512 positions, width 384, 10 routed layers of width 192."""

    def project(to: int) -> dict[str, Any]:
        return {"project": {"to": to, "bias": True, "experts": {"names": 4, **projection}}}

    config = {
        "width": 384,
        "context": 512,
        "positions": "learned",
        "tie_embeddings": True,
        "norm": "layer",
        "block": {"norm": "layer", "attention": {"heads": 6, "bias": True}, "feed": feed},
        "stages": [
            "block",
            project(192),
            {"parallel": {"layers": 10, "paths": 4, "attention": {"heads": 3}, "join": {"kind": "routed", "top_k": 2}}},
            project(384),
            "block",
        ],
    }
    return BraidConfig(config, vocab_size=16_384)


def test_moep_has_its_parameters() -> None:
    cost = model_cost(skeleton(moep({"kind": "mlp", "bias": True}, {})))
    assert cost.parameters == 28_434_480
    assert cost.active_parameters == 19_241_136


@pytest.mark.parametrize("recipe", ["moep-28m", "moep-swiglu-38m"])
def test_the_recipes_models_cost_as_much_as_the_paper_says(recipe: str) -> None:
    from braidlm.core.recipes import compose_recipe

    model = compose_recipe(f"models/{recipe}")
    model.pop("name", None)
    size = model.pop("vocab_size")
    cost = model_cost(skeleton(BraidConfig(model, vocab_size=size)))
    assert cost.parameters == pytest.approx({"moep-28m": 28_434_480, "moep-swiglu-38m": 38e6}[recipe], rel=0.02)
