"""Mixture of depths: which tokens enter, what a block then computes, what it costs, and what its router learns."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from braidlm.core.models.accounting import cost_of, model_cost
from braidlm.model.errors import BraidError
from braidlm.model.mixture_of_depths import MixtureOfDepths
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.losses import routing_loss, usages
from tests.plain_losses import plain_losses
from tests.tiny_models import random_ids, tiny_config, tiny_model

BLOCKS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "grouped queries and window": {"attention": {"kv_heads": 2, "window": 3}},
    "stick-breaking": {"attention": {"kind": "stick_breaking", "rest": "current", "current": False}},
    "sparse experts": {
        "attention": {"experts": {"names": 3, "router": {"compute": "sparse"}}},
        "feed": {"experts": {"names": 3, "router": {"compute": "sparse"}}},
    },
    "experts of chosen tokens": {"attention": {"experts": {"names": 3, "scope": "routed", "router": {"top_k": 1}}}},
    "mixture of heads": {"attention": {"experts": {"names": 3, "keys": "shared"}}},
}


def depths_model(dtype: torch.dtype = torch.float64, **options: Any) -> BraidForCausalLM:
    return tiny_model(dtype, stages=[{"mixture_of_depths": options}])


def the_layer(model: BraidForCausalLM) -> MixtureOfDepths:
    return next(module for module in model.modules() if isinstance(module, MixtureOfDepths))


def stream(batch: int, time: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, time, 16, dtype=torch.float64, generator=generator)


def outcome(model: BraidForCausalLM, run: Any, hidden: Tensor) -> list[Tensor]:
    """The stream after the layer, every gradient, and what the routers inside say of the tokens that they saw."""
    hidden = hidden.clone().requires_grad_()
    model.zero_grad()
    output, routings = run(hidden)
    output.square().sum().backward()
    gradients = [p.grad.clone() for p in the_layer(model).block.parameters() if p.grad is not None]
    seen = [x[r.present_BT] for r in routings for x in (r.probabilities_BTN, r.weights_BTN)]
    assert hidden.grad is not None
    return [output.detach(), hidden.grad, *gradients, *(x.detach() for x in seen)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 5
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_running_some_tokens_equals_hiding_the_others(kind: str, padded: bool) -> None:
    model = depths_model(**BLOCKS[kind])
    layer, hidden = the_layer(model), stream(3, 9)
    mask = torch.ones(3, 9, dtype=torch.long)
    if padded:
        mask[0, :4] = mask[1, 6:] = 0
    span = model.model.span(hidden, mask)
    entered = (torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.5) & mask.bool()
    assert 1 < entered.sum(1).min() < entered.sum(1).max()
    weight = torch.rand(3, 9, dtype=torch.float64) * entered
    count = int(entered.sum(1).max())
    gathered = outcome(model, lambda h: layer.run_gathered(h, weight, entered, count, span), hidden)
    masked = outcome(model, lambda h: layer.run_masked(h, weight, entered, span), hidden)
    assert_equal(gathered, masked)


@given(st.lists(st.booleans(), min_size=2, max_size=9), st.sampled_from(sorted(BLOCKS)))
@settings(max_examples=30)
def test_a_sequence_computes_what_its_entered_tokens_do_alone(entered: list[bool], kind: str) -> None:
    """At their own positions, so that a token knows how far away another is."""
    model = depths_model(**BLOCKS[kind] | ({"attention": {"heads": 4}} if "window" in kind else {}))
    layer, hidden = the_layer(model), stream(1, len(entered))
    chosen = torch.tensor([entered])
    alone = hidden[:, chosen[0]]
    expected = hidden.clone()
    if alone.shape[1]:
        own = model.model.span(alone, position_ids=chosen.nonzero()[None, :, 1])
        expected[:, chosen[0]] = alone + 0.3 * (layer.block(alone, own)[0] - alone)
    weight = 0.3 * chosen.double()
    span = model.model.span(hidden)
    for output, _ in (
        layer.run_gathered(hidden, weight, chosen, max(1, sum(entered)), span),
        layer.run_masked(hidden, weight, chosen, span),
    ):
        torch.testing.assert_close(output, expected, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize(("capacity", "count"), [(0.5, 6), (0.25, 3), (0.01, 1), (1.0, 12)])
def test_a_share_of_each_row_enters_in_training(capacity: float, count: int) -> None:
    model = depths_model(capacity=capacity).train()
    (routing,) = model(random_ids(3, 12)).routings
    assert routing.choices == ("block", "around")
    assert (routing.chosen_BTK[..., 0] == 0).sum(1).tolist() == [count] * 3
    torch.testing.assert_close(
        usages((routing,), torch.ones(3, 12))[routing.name], torch.tensor([count / 12, 1 - count / 12])
    )


def test_those_with_the_highest_scores_enter_and_padding_comes_last() -> None:
    model = depths_model(capacity=0.5).train()
    layer, hidden = the_layer(model), stream(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :5] = 0
    _, (routing,) = layer(hidden, model.model.span(hidden, mask))
    entered = routing.chosen_BTK[..., 0] == 0
    scores = layer.score(hidden / hidden.square().mean(-1, keepdim=True).sqrt())[..., 0]
    assert scores[0][entered[0]].min() > scores[0][~entered[0]].max()
    assert entered[1, 5:].all()


def test_the_scores_learn_through_the_output_and_the_router_from_the_choice_alone() -> None:
    model = depths_model().train()
    ids = random_ids(4, 13)
    text, added, _ = plain_losses(model, ids[:, :-1], ids[:, 1:])
    assert added is not None
    assert not any(p.grad is not None for p in model.parameters())
    added.backward(retain_graph=True)
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert touched == {name for name, _ in model.named_parameters() if ".router." in name}
    model.zero_grad()
    text.backward()
    assert the_layer(model).score.weight.grad is not None
    assert all(p.grad is None for p in the_layer(model).router.parameters())


def test_the_router_learns_to_choose_as_the_scores_do() -> None:
    model = depths_model(torch.float32).train()
    layer, hidden = the_layer(model), stream(16, 32).float()
    span = model.model.span(hidden)
    optimizer = torch.optim.Adam(layer.router.parameters(), lr=0.02)
    real = torch.ones(16, 32)

    def agreement() -> float:
        in_training = layer.train()(hidden, span)[1][0].chosen_BTK
        return (in_training == layer.eval()(hidden, span)[1][0].chosen_BTK).float().mean().item()

    assert agreement() < 0.7
    for _ in range(100):
        optimizer.zero_grad()
        routing_loss(layer.train()(hidden, span)[1], real).backward()
        optimizer.step()
    assert agreement() > 0.9


def test_losses_of_experts_inside_read_the_tokens_that_entered_alone() -> None:
    model = depths_model(feed={"experts": {"names": 3, "router": {"losses": {"switch": 1.0, "z_loss": 0.1}}}}).train()
    layer, hidden = the_layer(model), stream(1, 8)
    _, (own, inside) = layer(hidden, model.model.span(hidden))
    entered = own.chosen_BTK[0, :, 0] == 0
    assert torch.equal(inside.present_BT[0], entered)
    cut = replace(
        inside,
        probabilities_BTN=inside.probabilities_BTN[:, entered],
        chosen_BTK=inside.chosen_BTK[:, entered],
        weights_BTK=inside.weights_BTK[:, entered],
        scores_BTN=inside.scores_BTN[:, entered],
        present_BT=None,
    )
    torch.testing.assert_close(routing_loss((inside,), torch.ones(1, 8)), routing_loss((cut,), torch.ones(1, 4)))


def test_a_step_of_generation_in_which_no_token_enters_leaves_the_block_out() -> None:
    model = depths_model()
    layer, ids = the_layer(model), random_ids(1, 8)
    with torch.no_grad():
        layer.router.scores.weight.zero_()
        layer.router.scores.bias.copy_(torch.tensor([-1.0, 1.0]))
    full = model(ids, use_cache=False).logits
    calls: list[int] = []
    layer.block.register_forward_hook(lambda *_: calls.append(1))
    cache = DynamicCache()
    stepwise = torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)], dim=1)
    assert calls == []
    model.set_attn_implementation("eager")
    assert model(ids, output_attentions=True).attentions[1].shape == (1, 4, 8, 8)
    torch.testing.assert_close(stepwise, full, rtol=0.0, atol=1e-9)


def test_sizes_in_training_depend_on_shapes_alone() -> None:
    """So that a step can be recorded and replayed: a fake tensor has no values to look at."""
    with FakeTensorMode():
        model = BraidForCausalLM(tiny_config(stages=[{"mixture_of_depths": {}}])).train()
        ids = torch.zeros(2, 8, dtype=torch.long)
        embedded = model.model.embedding(ids)
        layer = the_layer(model)
        layer.router._check = lambda probabilities, where: None  # type: ignore[method-assign]
        hidden, _ = layer(embedded, model.model.span(embedded))
        assert hidden.shape == embedded.shape


def test_cost_falls_with_capacity() -> None:
    full, half, eighth = (
        cost_of(tiny_model(stages=[stage]).model.stages[0].layers[1], 32)
        for stage in (
            {"block": {"layers": 2}},
            {"mixture_of_depths": {"capacity": 0.5}},
            {"mixture_of_depths": {"capacity": 0.125}},
        )
    )
    router = cost_of(the_layer(depths_model()).router, 32).flops_per_token + 2 * 16
    attention = 4 * 16 * (32 * 33 // 2) / 32
    products = full.flops_per_token - attention
    for cost, share in ((half, 0.5), (eighth, 0.125)):
        expected = router + share * products + share**2 * attention
        assert cost.flops_per_token == pytest.approx(expected, abs=4)
    assert eighth.active_parameters < half.active_parameters < full.active_parameters


def test_experts_inside_cost_their_share_of_the_share() -> None:
    options = {"feed": {"hidden": 32, "experts": {"names": 4, "router": {"top_k": 1}}}}
    model = depths_model(**options, capacity=0.5)
    plain = tiny_model(torch.float64, stages=[{"block": {"layers": 2, **options}}])
    assert the_layer(model).block.feed.bank.out.active_share == 0.125
    assert model_cost(model, 32).active_parameters < model_cost(plain, 32).active_parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity: expected a number above 0 and at most 1, got 0"),
        ({"capacity": 1.5}, "capacity: expected a number above 0 and at most 1, got 1.5"),
        ({"layers": 2, "every": 3}, "every is 3, and there are only 2 layers"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BraidError, match="mixture_of_depths") as error:
        depths_model(**options)
    assert message in str(error.value)
