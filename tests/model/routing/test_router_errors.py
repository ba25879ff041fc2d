"""Errors for routed blocks and experts that cannot be built, and for a router whose scores are NaN."""

from typing import Any

import pytest
import torch
from torch import nn

from braidlm.model.errors import BraidError
from braidlm.model.feed.feeds import feeds
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.model.routed_models import routed_model
from tests.tiny_models import random_ids, tiny_config, tiny_model

STAGE = "model.stages[0].parallel"
BLOCK = "model.stages[0].block"


def refused(stage: dict[str, Any]) -> str:
    with pytest.raises(BraidError) as caught:
        BraidForCausalLM(tiny_config(stages=[stage]))
    return str(caught.value)


@pytest.mark.parametrize(
    ("join", "text"),
    [
        ({"top_k": 5}, "top_k is 5, and there are only 4 to choose from"),
        ({"top_k": 5, "per": "sublayer"}, "top_k is 5, and there are only 4 experts"),
        ({"top_k": 0}, f"{STAGE}.join.top_k: expected a whole number from 1 to 4096, got 0"),
        ({"scope": "routet"}, f"{STAGE}.join.scope: 'routet' is not one of all, routed. Did you mean 'routed'?"),
        ({"per": "layer"}, f"{STAGE}.join.per: 'layer' is not one of block, sublayer."),
        ({"compute": "fast"}, f"{STAGE}.join.compute: 'fast' is not one of measured, sparse, dense."),
        ({"balance_rate": -0.1}, f"{STAGE}.join.balance_rate: expected a number from 0 to 1, got -0.1"),
        ({"noise": -1.0}, f"{STAGE}.join.noise: expected a number from 0 to 1e9, got -1.0"),
        ({"losses": {"swich": 1.0}}, f"{STAGE}.join: losses: unknown routing loss 'swich'. Did you mean 'switch'?"),
        ({"topk": 2}, f"{STAGE}.join: unknown key 'topk'. Did you mean 'top_k'?"),
    ],
    ids=str,
)
def test_a_routed_join_that_cannot_be_built(join: dict[str, Any], text: str) -> None:
    assert text in refused({"parallel": {"paths": 4, "join": {"kind": "routed", **join}}})


SUBLAYER = {"kind": "routed", "per": "sublayer"}


@pytest.mark.parametrize(
    ("parallel", "texts"),
    [
        (
            {"paths": {"a": {"width": 8}, "b": {"width": 8}}},
            [
                "paths chosen per sublayer read and write the stream as it is",
                "Leave out width and `to`; heads, head_dim and hidden make the paths narrow.",
            ],
        ),
        ({"paths": 2, "to": 24}, ["paths chosen per sublayer read and write the stream as it is"]),
        (
            {"paths": {"a": {}, "b": {"attention": {"heads": 2}}}},
            ["paths chosen per sublayer must be of one shape: give them the same options"],
        ),
        (
            {"paths": {"a": {"depth": 2}, "b": {"depth": 2}}},
            ["paths chosen per sublayer have one block in each layer: leave out depth"],
        ),
        (
            {"paths": 2, "feed": {"kind": "mlp", "experts": 2}},
            ["paths chosen per sublayer must be of one shape: give them the same options"],
        ),
    ],
    ids=str,
)
def test_paths_that_cannot_be_chosen_per_sublayer(parallel: dict[str, Any], texts: list[str]) -> None:
    message = refused({"parallel": {**parallel, "join": SUBLAYER}})
    for text in texts:
        assert text in message


@pytest.mark.parametrize(
    ("part", "experts", "text"),
    [
        ("feed", 0, f"{BLOCK}.feed.experts.names: expected a whole number from 1 to 4096, got 0"),
        ("attention", [], f"{BLOCK}.attention.experts: expected a number of experts or a mapping, got '[]'"),
        ("feed", 1, f"{BLOCK}.feed.experts: top_k is 2, and there are only 1 experts"),
        ("attention", {"names": ["a", "a"]}, f"{BLOCK}.attention.experts: a name is given twice: a, a"),
        ("feed", {"names": 2, "shared": 0}, f"{BLOCK}.feed.experts.shared: expected a whole number from 1 to 100000"),
        ("attention", {"names": 2, "shared": 8}, f"{BLOCK}.attention.experts: unknown key 'shared'."),
        (
            "attention",
            {"names": 2, "scope": "none"},
            f"{BLOCK}.attention.experts.scope: 'none' is not one of all, routed.",
        ),
        (
            "feed",
            {"names": 3, "router": {"top_k": 4}},
            f"{BLOCK}.feed.experts: top_k is 4, and there are only 3 experts",
        ),
        (
            "feed",
            {"names": 3, "router": {"noise": -1}},
            f"{BLOCK}.feed.experts.router.noise: expected a number from 0 to 1e9, got -1",
        ),
        ("feed", True, f"{BLOCK}.feed.experts: expected a number of experts or a mapping, got 'True'"),
    ],
    ids=str,
)
def test_experts_that_cannot_be_built(part: str, experts: Any, text: str) -> None:
    assert text in refused({"block": {part: {"experts": experts}}})


def test_a_part_that_cannot_be_stacked_cannot_be_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(feeds["mlp"]):  # type: ignore[misc]
        stackable = False

    monkeypatch.setitem(feeds.parts, "alone", Alone)
    message = refused({"block": {"feed": {"kind": "alone", "experts": 2}}})
    assert "feed-forward 'alone' cannot be one of several experts" in message
    message = refused({"parallel": {"paths": 2, "feed": {"kind": "alone"}, "join": SUBLAYER}})
    assert "paths chosen per sublayer must be of one shape" in message


@pytest.mark.parametrize("per", ["block", "sublayer"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_router_whose_scores_are_not_numbers_is_named(per: str, broken: float) -> None:
    model = routed_model({"per": per})
    router_name = "stages.0.layers.1.join.router" if per == "block" else "stages.0.layers.1.feed.router"
    router: nn.Module = model.model.get_submodule(router_name)
    router.scores.weight.data[1, 2] = broken
    with pytest.raises(BraidError) as caught:
        model(random_ids(2, 5))
    message = str(caught.value)
    assert message.startswith(f"{router_name}: the router's scores are not numbers")
    assert "go back to a checkpoint before that" in message


def test_a_projections_router_is_named_too() -> None:
    model = tiny_model(stages=["block", {"project": {"to": 16, "experts": 3}}])
    model.model.stages[1].experts.router.scores.bias.data[0] = torch.nan
    with pytest.raises(BraidError, match=r"stages\.1\.experts\.router: the router's scores are not numbers"):
        model(random_ids(2, 5))
