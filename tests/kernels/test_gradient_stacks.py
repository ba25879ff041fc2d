"""Layers whose weight gradients are computed together: who shares memory, and that nobody waits for a layer in vain."""

from typing import Any

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels import lowered_parts
from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.lowered_model import LoweredModel
from braidlm.kernels.lowerings.feeds import first_linear
from braidlm.kernels.routed.choices import MAX_FEW
from braidlm.kernels.routed.permutation import TILE, row_bound
from braidlm.model.feed.feeds import RoutedFeed
from tests.kernels.comparison import TOLERANCES, assert_close, side_stream
from tests.kernels.whole_models import plain_stream, results
from tests.tiny_models import random_ids, tiny_model

BATCH, TIME, EXPERTS, TOP_K = 3, 7, 4, 2
BLOCK: dict[str, Any] = {
    "norm": "layer",
    "attention": {"heads": 1, "bias": True},
    "feed": {
        "kind": "mlp",
        "hidden": 24,
        "bias": True,
        "experts": {"names": EXPERTS, "shared": 20, "router": {"top_k": TOP_K, "compute": "sparse"}},
    },
}


@pytest.fixture
def two_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of two banks."""
    monkeypatch.setattr(lowered_parts, "GROUPED_ROWS", 2 * row_bound(BATCH * TIME, TOP_K, EXPERTS, TILE))


def model_of(layers: int, device: str, experts: int = EXPERTS, **options: Any) -> Any:
    feed = {**BLOCK["feed"], "experts": {**BLOCK["feed"]["experts"], "names": experts}}
    stages = [{"block": {"layers": layers}}]
    return tiny_model(positions="learned", block={**BLOCK, "feed": feed}, stages=stages, **options).to(device).train()


def assert_equals_plain(model: Any, device: str) -> dict[torch.nn.Module, GradientSlot]:
    """The stream and all gradients, by kernels and by the plain forward; the slots of the first."""
    ids, side = random_ids(BATCH, TIME).to(device), side_stream(device)
    weights = torch.randn(BATCH, TIME, model.model.width_out, device=device)
    lowered, contexts = LoweredModel(model, side), []

    def stream(ids: torch.Tensor) -> tuple[Any, ...]:
        hidden, routings, context = lowered.stream(ids)
        contexts.append(context)
        return hidden, routings

    actual = results(model, stream, ids, weights, torch.float32, side)
    plain = results(model, lambda ids: plain_stream(model.model, ids), ids, weights, torch.float32, None)
    assert actual.keys() == plain.keys()
    for what, expected in plain.items():
        assert_close(actual[what], expected.double(), 4 * TOLERANCES[torch.float32], what)
    slots: dict[torch.nn.Module, GradientSlot] = contexts[0].slots
    for slot in slots.values():
        assert not slot.stack.pending, "a layer was waited for in vain"
        assert not hasattr(slot.stack, "inputs"), "the rows were not given back"
    return slots


def stacks_of(slots: dict[torch.nn.Module, GradientSlot], matrices: list[Any]) -> list[int]:
    """The number of layers that each of some matrices has its gradient computed together with."""
    return [slots[matrix].stack.layers for matrix in matrices]


def feeds(model: Any) -> list[Any]:
    return [layer.feed for layer in model.model.stages[0].layers]


@pytest.mark.usefixtures("two_together")
def test_experts_and_their_shared_part_have_stacks_of_the_same_layers(device: str) -> None:
    """Of an odd number of layers."""
    model = model_of(3, device)
    slots = assert_equals_plain(model, device)
    for part in ("bank", "shared"):
        for matrices in (
            [first_linear(getattr(f, part)) for f in feeds(model)],
            [getattr(f, part).out for f in feeds(model)],
        ):
            assert stacks_of(slots, matrices) == [2, 2, 1]


def test_a_router_with_many_choices_has_a_stack_of_the_same_layers(device: str) -> None:
    """With few, the kernel of its backward pass sums the gradient of its weight."""
    for experts, many in ((MAX_FEW, False), (MAX_FEW + 1, True)):
        model = model_of(2, device, experts)
        slots = assert_equals_plain(model, device)
        for feed in feeds(model):
            assert (feed.router.scores in slots) == many
            if many:
                assert stacks_of(slots, [feed.router.scores]) == stacks_of(slots, [feed.bank.out]) == [2]


def test_experts_and_their_shared_part_share_what_they_read_and_the_gradient_of_their_sum(device: str) -> None:
    """The rows of other matrices are in memory only from the backward pass on."""
    model = model_of(2, device)
    with torch.no_grad():
        _, _, context = LoweredModel(model, side_stream(device)).stream(random_ids(BATCH, TIME).to(device))
    for feed in feeds(model):
        up, out, shared_up, shared_out = (
            context.slots[matrix].stack
            for matrix in (first_linear(feed.bank), feed.bank.out, first_linear(feed.shared), feed.shared.out)
        )
        assert up.inputs is shared_up.inputs
        assert out.gradients is shared_out.gradients
        written = [rows for stack in (up, out, shared_out) for rows in (stack.inputs, stack.gradients)]
        assert ["tensor" in vars(rows) for rows in written] == [True, False, False, False, True, False]


@pytest.mark.usefixtures("two_together")
def test_a_layer_that_kernels_refuse_is_not_waited_for(device: str) -> None:
    model = model_of(4, device)
    feeds(model)[1].__class__ = type("OtherFeed", (RoutedFeed,), {})
    slots = assert_equals_plain(model, device)
    assert first_linear(feeds(model)[1].bank) not in slots
    assert stacks_of(slots, [feed.bank.out for index, feed in enumerate(feeds(model)) if index != 1]) == [2, 2, 1]


def test_experts_before_a_layer_that_kernels_refuse(device: str) -> None:
    """Its plain forward reads the sum that a norm by kernels would have computed."""
    model = model_of(3, device)
    attention: Any = model.model.stages[0].layers[1].attention
    attention.__class__ = type("OtherAttention", (type(attention),), {})
    assert_equals_plain(model, device)


@pytest.mark.parametrize(
    "frozen", ["shared.up.weight", "shared.out.weight", "bank.up.weight", "bank.out.weight", "router.scores.weight"]
)
def test_layers_beside_a_frozen_one_train(frozen: str, device: str) -> None:
    model = model_of(3, device, MAX_FEW + 1)
    feeds(model)[1].get_parameter(frozen).requires_grad_(False)
    assert not assert_equals_plain(model, device)


@pytest.mark.usefixtures("two_together")
@pytest.mark.parametrize("dropout", [0.3, {"feed": 0.3}], ids=["of what layers add", "of activations"])
def test_dropout_is_the_same_with_stacks(dropout: Any, device: str) -> None:
    """The gradient of what a layer adds differs from that of the stream."""
    model, both = model_of(3, device, dropout=dropout), []
    ids = random_ids(BATCH, TIME).to(device)
    weights = torch.randn(BATCH, TIME, model.model.width_out, device=device)
    for side in (None, side_stream(device)):
        torch.manual_seed(3)
        both.append(results(model, LoweredModel(model, side).stream, ids, weights, torch.float32, side))
    for what, expected in both[0].items():
        assert_close(both[1][what], expected.double(), 2 * TOLERANCES[torch.float32], what)
