"""The faster way: forced or measured, once for each shape, and never noticed by the pass that asks for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from routed_models import assert_alike, outcome, routed_model
from torch import Tensor, nn
from transformers import DynamicCache

from braidlm.model.routing import ways
from braidlm.model.routing.routing import Routing
from braidlm.model.routing.ways import TRIALS, faster_way
from tiny_models import random_ids

BANK = nn.Linear(4, 4)


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_found", {})


def choice(x: Tensor) -> Routing:
    probabilities = torch.full((*x.shape[:-1], 2), 0.5)
    return Routing("router", ("a", "b"), probabilities, torch.zeros_like(probabilities).long(), probabilities)


class Counted:
    """A way that counts how often it is gone."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        self.calls += 1
        return BANK(x) * routing.weights_BTK.sum(-1, keepdim=True)


def ask(x: Tensor, sparse: Counted, dense: Counted, compute: Any = "measured", facts: tuple[object, ...] = ()) -> str:
    return faster_way(compute, BANK, facts, x, choice(x), sparse, dense)


def test_a_way_can_be_forced() -> None:
    sparse, dense = Counted(), Counted()
    for way in ("sparse", "dense"):
        assert ask(torch.zeros(2, 3, 4), sparse, dense, way) == way
    assert sparse.calls == dense.calls == 0
    assert not ways._found


def test_each_shape_is_measured_once() -> None:
    sparse, dense = Counted(), Counted()
    x = torch.zeros(2, 4, 4)
    measured = 0
    for new, again in (
        (lambda: ask(x, sparse, dense), True),
        (lambda: ask(x, sparse, dense), False),
        (lambda: ask(torch.ones(1, 8, 4), sparse, dense), False),  # as many tokens
        (lambda: ask(torch.ones(1, 7, 4), sparse, dense), False),  # nearly as many
        (lambda: ask(torch.ones(1, 9, 4), sparse, dense), True),
        (lambda: ask(x, sparse, dense, facts=("routed",)), True),
        (torch.no_grad()(lambda: ask(x, sparse, dense)), True),
    ):
        assert new() in ("sparse", "dense")
        measured += again
        assert sparse.calls == dense.calls == measured * TRIALS


@pytest.mark.parametrize(("seconds", "way"), [(2.0, "sparse"), (0.95, "sparse"), (0.5, "dense")])
def test_dense_must_be_clearly_faster(seconds: float, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse, dense = Counted(), Counted()
    monkeypatch.setattr(ways, "_time", lambda gone, *_: 1.0 if gone is sparse else seconds)
    assert ask(torch.zeros(2, 3, 4), sparse, dense) == way


def test_nothing_is_measured_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse, dense = Counted(), Counted()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert ask(torch.zeros(2, 3, 4), sparse, dense) == "dense"
    assert sparse.calls == dense.calls == 0
    assert not ways._found


MODELS: dict[str, Callable[[str], Any]] = {
    "block": lambda compute: routed_model({"compute": compute}),
    "block, scope routed": lambda compute: routed_model({"compute": compute, "scope": "routed"}),
    "sublayer": lambda compute: routed_model({"compute": compute, "per": "sublayer"}),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_measured_model_is_a_forced_one(model: str) -> None:
    measured, forced = outcome(MODELS[model]("measured")), outcome(MODELS[model]("sparse"))
    assert ways._found
    assert_alike(measured, forced)


@pytest.mark.parametrize("model", MODELS)
def test_a_trial_leaves_nothing_in_a_checkpointed_pass(model: str) -> None:
    """It would count what is kept for the backward pass, and find less in the second forward."""
    measured, forced = MODELS[model]("measured"), MODELS[model]("sparse")
    measured.gradient_checkpointing_enable()
    assert not ways._found
    assert_alike(outcome(measured), outcome(forced))


@pytest.mark.parametrize("model", MODELS)
def test_a_trial_leaves_random_numbers_gradients_and_the_cache_alone(model: str) -> None:
    made, ids, cache = MODELS[model]("measured"), random_ids(2, 7), DynamicCache()
    made.train()
    for part in made.modules():
        if hasattr(part, "rate"):
            part.rate = 0.5  # so that trials draw random numbers
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        made(ids, use_cache=False).logits.sum()
        states.append(torch.get_rng_state())
    assert torch.equal(*states), "measured in the first pass only"
    assert all(p.grad is None for p in made.parameters())
    ways._found.clear()
    made.eval()(ids, past_key_values=cache, use_cache=True)
    assert ways._found
    assert cache.get_seq_length() == 7
    assert all(layer.keys.shape[2] == 7 for layer in cache.layers)


def test_a_trial_has_gradients_where_the_pass_has() -> None:
    seen = []

    def way(x: Tensor, routing: Routing) -> Tensor:
        seen.append((x.requires_grad, x.grad_fn, routing.weights_BTK.requires_grad, routing.weights_BTK.grad_fn))
        return BANK(x) * routing.weights_BTK.sum(-1, keepdim=True)

    x = torch.zeros(2, 3, 4, requires_grad=True) + 1.0
    learned = choice(x).weights_BTK.requires_grad_() * 1.0
    routing = replace(choice(x), weights_BTK=learned)
    faster_way("measured", BANK, (), x, routing, way, way)
    assert seen == [(True, None, True, None)] * 2 * TRIALS
    assert BANK.weight.grad is None
