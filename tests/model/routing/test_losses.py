"""Routing losses: values at the extremes, directions of gradients, padding, and that they are always added."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.errors import BraidError
from braidlm.model.heads.losses import next_token_loss, shift_labels
from braidlm.model.modeling_braid import BraidForSequenceClassification
from braidlm.model.routing.losses import (
    _group_by_shape,
    evaluate_together,
    load,
    loads,
    routing_loss,
    routing_losses,
    usage,
    usages,
)
from braidlm.model.routing.routing import Routing
from tests.model.parallel_layers import path_model
from tests.plain_losses import plain_losses
from tests.tiny_models import random_ids, randomised

NAMES = ("a", "b", "combined")


def routing(probabilities: Tensor, weights: Tensor | None = None, losses: dict[str, float] | None = None) -> Routing:
    """A record in which every choice counts by its probability, unless weights are given."""
    chosen = torch.arange(probabilities.shape[-1]).expand_as(probabilities)
    counted = probabilities if weights is None else weights
    scores = probabilities.clamp_min(1e-9).log()
    return Routing("router", NAMES, probabilities, chosen, counted, losses or {}, scores)


def ones(record: Routing) -> Tensor:
    return torch.ones(record.probabilities_BTN.shape[:2])


EVEN = torch.full((2, 6, 3), 1 / 3)
ONE_FOR_ALL = torch.tensor([1.0, 0.0, 0.0]).expand(2, 6, 3)
EACH_ITS_OWN = torch.eye(3).repeat(4, 1).view(2, 6, 3)
"""Every token is certain, and all choices are used equally."""

VALUES: dict[str, tuple[float, float, float]] = {
    "token_entropy": (0.0, math.log(3), math.log(3)),
    "token_entropy_as_printed": (math.log(3) * 2 / 3, 0.0, 0.0),
    "token_entropy_as_coded": (-math.log(3), 0.0, 0.0),
    "load_balance": (0.0, math.log(3), 0.0),
    "load_balance_as_printed": (math.log(3) * 2 / 3, 0.0, math.log(3) * 2 / 3),
    "load_balance_as_coded": (math.log(3), 0.0, math.log(3)),
    "switch": (1.0, 3.0, 1.0),
    "new_rows": (0.0, 0.0, 0.0),
    "mutual_information": (0.0, 0.0, -math.log(3)),
    "load_concentration": (math.log(3), 0.0, math.log(3)),
    "z_loss": (0.0, 0.0, 0.0),
    "cross_entropy": (math.log(3), 0.0, 0.0),
}
"""Of each loss at EVEN, ONE_FOR_ALL, EACH_ITS_OWN. Minimised, so the plain names want the even and the printed load
terms the collapsed."""


def test_every_loss_has_its_values_here() -> None:
    assert set(VALUES) == set(routing_losses)


@pytest.mark.parametrize("name", VALUES)
def test_values_at_the_extremes(name: str) -> None:
    for probabilities, value in zip((EVEN, ONE_FOR_ALL, EACH_ITS_OWN), VALUES[name], strict=True):
        record = routing(probabilities)
        assert routing_losses[name](record, ones(record)).item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "wants_balance"),
    [
        ("load_balance", True),
        ("switch", True),
        ("mutual_information", True),
        ("load_balance_as_printed", False),
        ("load_balance_as_coded", False),
        ("load_concentration", False),
    ],
)
def test_balanced_against_collapsed(name: str, wants_balance: bool) -> None:
    balanced, collapsed = (routing_losses[name](routing(p), torch.ones(2, 6)) for p in (EACH_ITS_OWN, ONE_FOR_ALL))
    assert (balanced < collapsed) == wants_balance


@pytest.mark.parametrize(
    ("name", "wants_soft"),
    [("token_entropy", True), ("token_entropy_as_printed", False), ("token_entropy_as_coded", True)],
)
def test_soft_against_sharp(name: str, wants_soft: bool) -> None:
    soft, sharp = (routing_losses[name](routing(p), torch.ones(2, 6)) for p in (EVEN, EACH_ITS_OWN))
    assert (soft < sharp) == wants_soft


def after_training(name: str, steps: int = 300) -> Tensor:
    """The probabilities of a skewed router after it has followed one loss alone."""
    torch.manual_seed(0)
    scores = (torch.randn(4, 16, 3) + torch.tensor([1.5, 0.0, -0.5])).requires_grad_()
    optimizer = torch.optim.Adam([scores], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        record = routing(scores.softmax(-1))
        routing_losses[name](record, ones(record)).backward()
        optimizer.step()
    return scores.softmax(-1).detach()


def shares(probabilities: Tensor) -> Tensor:
    return probabilities.mean((0, 1))


def sharpness(probabilities: Tensor) -> float:
    return probabilities.amax(-1).mean().item()


@pytest.mark.parametrize("name", ["token_entropy", "token_entropy_as_coded"])
def test_token_entropy_makes_tokens_soft(name: str) -> None:
    assert sharpness(after_training(name, 0)) > 0.6
    assert sharpness(after_training(name)) < 0.4


def test_the_printed_token_entropy_makes_tokens_sharp() -> None:
    assert sharpness(after_training("token_entropy_as_printed")) > 0.99


def test_load_balance_evens_the_use_without_softening_tokens() -> None:
    before, after = after_training("load_balance", 0), after_training("load_balance")
    assert shares(before).max() > 0.6
    torch.testing.assert_close(shares(after), torch.full((3,), 1 / 3), rtol=0.0, atol=0.01)
    assert sharpness(after) > 0.5


def test_mutual_information_evens_the_use_and_makes_tokens_sharp() -> None:
    before, after = after_training("mutual_information", 0), after_training("mutual_information")
    assert shares(after).max() < shares(before).max() - 0.1
    assert sharpness(after) > 0.99


def test_load_concentration_gives_all_tokens_to_few() -> None:
    assert shares(after_training("load_concentration")).max() > 0.99


def test_switch_pushes_tokens_away_from_a_crowded_choice() -> None:
    """Of top-1 picks, where the first choice has most."""
    scores = torch.randn(4, 16, 3, generator=torch.Generator().manual_seed(0)) + torch.tensor([1.5, 0.0, -0.5])
    scores.requires_grad_()
    probabilities = scores.softmax(-1)
    weights, chosen = probabilities.topk(1, dim=-1)
    record = Routing("router", NAMES, probabilities, chosen, weights, {}, scores)
    routing_losses["switch"](record, torch.ones(4, 16)).backward()
    assert scores.grad is not None
    crowded = scores.grad.sum((0, 1))
    assert crowded[0] > 0 > crowded[2], "descending lowers the crowded choice's scores and raises the rare one's"


def test_new_rows_is_the_squared_norm_and_shrinks_it() -> None:
    """As the paper prints it, a sum; routers without new rows add nothing, alone and evaluated together."""
    measure, mask = routing_losses["new_rows"], ones(routing(EVEN))
    rows = [torch.tensor([[3.0, 4.0], [0.0, 1.0]], requires_grad=True), torch.tensor([[1.0, 1.0], [1.0, 1.0]])]
    group = [replace(routing(EVEN), new_rows=one, losses={"new_rows": 0.5}) for one in rows]
    assert measure(group[0], mask).item() == 26.0
    torch.testing.assert_close(evaluate_together(measure, group, mask), torch.tensor([26.0, 4.0]))
    assert evaluate_together(measure, [routing(EVEN), routing(EVEN)], mask).tolist() == [0.0, 0.0]
    plain = routing(EVEN, losses={"new_rows": 0.5})
    total = routing_loss((group[0], plain, group[1]), mask)
    assert total.item() == 15.0
    total.backward()
    torch.testing.assert_close(rows[0].grad, rows[0].detach())


def test_z_loss_shrinks_scores_and_says_when_there_are_none() -> None:
    scores = torch.tensor([[[3.0, 1.0, 0.0]]], requires_grad=True)
    record = Routing("router", NAMES, scores.softmax(-1), *scores.softmax(-1).topk(1)[::-1], {}, scores)
    loss = routing_losses["z_loss"](record, torch.ones(1, 1))
    assert loss.item() == pytest.approx(math.log(math.exp(3) + math.exp(1) + 1) ** 2, rel=1e-5)
    loss.backward()
    assert scores.grad is not None
    assert (scores.grad > 0).all()
    record.scores_BTN = None
    with pytest.raises(BraidError, match="router: z_loss needs the router's scores, which this router does not return"):
        routing_losses["z_loss"](record, torch.ones(1, 1))


@pytest.mark.parametrize("name", ["load_balance_as_printed", "load_balance_as_coded"])
def test_the_printed_load_term_collapses(name: str) -> None:
    assert shares(after_training(name)).max() > 0.99


def test_as_coded_terms_are_those_of_the_sample() -> None:
    """In nats: minus the entropy of each token's weights; the entropy of the weights' mean."""
    weights = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]])
    record, real = routing(EVEN[:1, :2], weights), torch.ones(1, 2)
    first = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25))
    assert routing_losses["token_entropy_as_coded"](record, real).item() == pytest.approx(-first / 2)
    mean = (0.75, 0.125, 0.125)
    entropy = -sum(p * math.log(p) for p in mean)
    assert routing_losses["load_balance_as_coded"](record, real).item() == pytest.approx(entropy)


@pytest.mark.parametrize("name", ["token_entropy_as_printed", "load_balance_as_printed"])
def test_the_printed_sums_are_over_the_paths(name: str) -> None:
    """Eqs 8 and 9 sum i = 1 to k, where a Gumbel join's router has k + 1 choices; of other routers all are summed."""
    record, real = routing(torch.tensor([[[0.5, 0.1, 0.4]]])), torch.ones(1, 1)
    of_paths = -(0.5 * math.log(0.5) + 0.1 * math.log(0.1))
    assert routing_losses[name](record, real).item() == pytest.approx(of_paths)
    of_experts = replace(record, choices=("a", "b", "c"))
    assert routing_losses[name](of_experts, real).item() == pytest.approx(of_paths - 0.4 * math.log(0.4))


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"new_rows"}))  # it reads the router's rows alone
def test_gradients_are_finite_where_a_probability_is_0(name: str) -> None:
    probabilities = ONE_FOR_ALL.clone().requires_grad_()
    record = routing(probabilities)
    routing_losses[name](record, ones(record)).backward()
    assert probabilities.grad is not None
    assert probabilities.grad.isfinite().all()


@given(seed=st.integers(0, 2**31), kept=st.lists(st.booleans(), min_size=12, max_size=12).filter(any))
def test_padding_is_never_included(seed: int, kept: list[bool]) -> None:
    generator = torch.Generator().manual_seed(seed)
    real = torch.tensor(kept).view(2, 6)
    scores = torch.randn(2, 6, 3, generator=generator) * 3
    other = torch.where(real[..., None], scores, torch.randn(2, 6, 3, generator=generator) * 9)
    alone = scores[real][None]
    for name in routing_losses:
        values = [
            routing_losses[name](routing(s.softmax(-1)), mask)
            for s, mask in ((scores, real), (other, real.long()), (alone, torch.ones(1, alone.shape[1])))
        ]
        torch.testing.assert_close(values[0], values[1])
        torch.testing.assert_close(values[0], values[2])
    used = usage(routing(alone.softmax(-1)), torch.ones(1, alone.shape[1]))
    torch.testing.assert_close(usage(routing(scores.softmax(-1)), real), used)


def test_a_batch_of_padding_alone_has_a_finite_loss() -> None:
    for name in routing_losses:
        assert routing_losses[name](routing(EVEN), torch.zeros(2, 6)).isfinite()


def test_usage_is_the_share_of_the_weight() -> None:
    weights = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    record = routing(EVEN[:1, :4], weights)
    assert usage(record, torch.ones(1, 4)).tolist() == [0.5, 0.25, 0.25]
    torch.testing.assert_close(usage(record, torch.tensor([[1, 0, 1, 1]])), torch.tensor([2 / 3, 0.0, 1 / 3]))


def test_load_is_the_unweighted_share_of_the_selections() -> None:
    probabilities = torch.tensor([[[0.5, 0.3, 0.2], [0.15, 0.8, 0.05], [0.6, 0.1, 0.3], [0.2, 0.1, 0.7]]])
    best = probabilities.topk(2)
    record = Routing("router", NAMES, probabilities, best.indices, best.values)
    assert load(record, torch.ones(1, 4)).tolist() == [0.5, 0.25, 0.25]
    assert load(record, torch.tensor([[1, 1, 0, 0]])).tolist() == [0.5, 0.5, 0.0]
    torch.testing.assert_close(usage(record, torch.tensor([[1, 0, 1, 0]])), torch.tensor([1.1, 0.3, 0.3]) / 1.7)
    zero_weights = Routing("router", NAMES, probabilities, best.indices, torch.zeros(1, 4, 2))
    assert load(zero_weights, torch.ones(1, 4)).tolist() == [0.5, 0.25, 0.25]
    assert load(record, torch.zeros(1, 4)).tolist() == [0.0, 0.0, 0.0]


def several(losses: dict[str, float] | None = None) -> list[Routing]:
    """Routings of one shape."""
    routings = []
    for number in range(3):
        scores = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(number), requires_grad=True)
        probabilities = scores.softmax(-1)
        best = probabilities.topk(2)
        weights = best.values / best.values.sum(-1, keepdim=True)
        routings.append(Routing(f"router {number}", NAMES, probabilities, best.indices, weights, losses or {}, scores))
    return routings


def test_usages_and_loads_are_by_router_in_order() -> None:
    other = Routing("between", ("x", "y"), *(t[..., :2] for t in (EVEN, torch.zeros(2, 6, 2).long(), EVEN)))
    first, second, third = several()
    routings, real = (third, other, first, second), torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])
    for of_all, of_one in ((usages, usage), (loads, load)):
        shares_by_router = of_all(routings, real)
        assert list(shares_by_router) == ["router 2", "between", "router 0", "router 1"]
        for record in routings:
            torch.testing.assert_close(shares_by_router[record.name], of_one(record, real).detach())
            assert not shares_by_router[record.name].requires_grad
    assert usages((), real) == loads((), real) == {}


@pytest.mark.parametrize("name", [*sorted(VALUES.keys() - {"new_rows"}), "usage", "load"])
def test_routings_of_one_shape_are_evaluated_together(name: str) -> None:
    measure = {"usage": usage, "load": load}.get(name) or routing_losses[name]
    real, results = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]]), []
    for at_once in (True, False):
        group = several()
        one_by_one = torch.stack([measure(one, real) for one in group])
        values = evaluate_together(measure, group, real) if at_once else one_by_one
        if name != "load":  # selections have no gradient
            (values * torch.arange(1.0, 1 + values.numel()).view_as(values)).sum().backward()
        results.append([values.detach(), *(one.scores_BTN.grad for one in group)])  # type: ignore[union-attr]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_routings_are_grouped_by_shape_and_losses() -> None:
    plain, weighed = several(), several({"switch": 0.2})
    wide = Routing("wide", NAMES, EVEN, torch.zeros(2, 6, 1).long(), torch.ones(2, 6, 1))
    groups = _group_by_shape((*plain, wide, *weighed))
    assert [len(group) for group in groups] == [3, 1, 3]
    assert groups[0] == plain
    assert groups[2] == weighed


def test_the_loss_of_a_model_is_the_weighted_sum_over_routers() -> None:
    first = routing(ONE_FOR_ALL, losses={"load_balance": 0.5, "token_entropy": 0.25})
    second = routing(EVEN, losses={"load_balance_as_printed": 2.0})
    without_losses = routing(EACH_ITS_OWN)
    total = routing_loss((first, second, without_losses), torch.ones(2, 6))
    assert total.item() == pytest.approx((0.5 + 0.25 + 2.0 * 2 / 3) * math.log(3))
    assert routing_loss((), torch.ones(2, 6)) == 0.0


WEIGHTS = {"load_balance": 0.7, "token_entropy": 0.3}
ROUTED: dict[str, Any] = {"layers": 2, "join": {"kind": "gumbel_v1", "losses": WEIGHTS}}


def expected_routing_loss(model: Any, ids: Tensor, real: Tensor) -> Tensor:
    """The routing loss by hand, with the noise of seed 0."""
    torch.manual_seed(0)
    routings = model(ids, attention_mask=real).routings
    assert len(routings) == 2
    return sum(w * routing_losses[name](r, real) for r in routings for name, w in WEIGHTS.items())


@pytest.mark.parametrize("flags", [{}, {"return_dict": False}, {"output_hidden_states": False, "use_cache": False}])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_in_the_training_loss_whatever_the_flags(flags: dict[str, Any], padded: bool) -> None:
    model, ids = path_model(**ROUTED).train(), random_ids(2, 6)
    real = torch.ones(2, 6, dtype=torch.long)
    if padded:
        real[1, :3] = 0
    labels = ids.masked_fill(real == 0, -100)
    expected = expected_routing_loss(model, ids, real)
    torch.manual_seed(0)
    output = model(ids, attention_mask=real if padded else None, labels=labels, **flags)
    loss, logits = output[:2]  # also of an output with names
    text = next_token_loss(logits, shift_labels(labels))
    torch.testing.assert_close(loss, text + expected, rtol=0.0, atol=1e-6)
    assert expected > 0.01


def test_evaluation_is_of_the_text_alone() -> None:
    model, ids = path_model(**ROUTED), random_ids(2, 6)
    output = model(ids, labels=ids)
    torch.testing.assert_close(output.loss, next_token_loss(output.logits, shift_labels(ids)))


def test_the_training_loop_and_the_forward_add_the_same() -> None:
    model, ids = path_model(**ROUTED).train(), random_ids(2, 7)
    torch.manual_seed(0)
    text, routing_part, routings = plain_losses(model, ids[:, :-1], ids[:, 1:])
    torch.manual_seed(0)
    torch.testing.assert_close(model.text_loss(ids[:, :-1], ids[:, 1:]), text)
    expected = expected_routing_loss(model, ids[:, :-1], torch.ones(2, 6, dtype=torch.long))
    torch.testing.assert_close(routing_part, expected, rtol=0.0, atol=1e-6)
    assert [r.name for r in routings] == ["stages.0.layers.0.join", "stages.0.layers.1.join"]


def test_targets_that_are_not_trained_on_are_left_out() -> None:
    model, ids = path_model(**ROUTED).train(), random_ids(2, 7)
    targets = ids[:, 1:].clone()
    targets[0, 2:] = -100
    torch.manual_seed(0)
    _, actual, _ = plain_losses(model, ids[:, :-1], targets)
    torch.manual_seed(0)
    routings = model(ids[:, :-1]).routings
    real = targets != -100
    expected = sum(w * routing_losses[name](r, real) for r in routings for name, w in WEIGHTS.items())
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-6)


def test_parts_of_a_batch_are_weighted_by_their_tokens() -> None:
    model, ids = path_model(**ROUTED).train(), random_ids(4, 7)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, 3:] = -100
    count = float((targets != -100).sum())
    total, expected = 0.0, 0.0
    for number, part in enumerate((slice(0, 2), slice(2, 4))):
        torch.manual_seed(number)
        total = total + plain_losses(model, inputs[part], targets[part], count)[1]
        torch.manual_seed(number)
        alone = plain_losses(model, inputs[part], targets[part])[1]
        expected = expected + alone * (targets[part] != -100).sum() / count
    torch.testing.assert_close(total, expected)


def test_transformers_count_of_items_scales_it_too() -> None:
    model, ids = path_model(**ROUTED).train(), random_ids(2, 6)
    losses = []
    for items in (None, 10, 40):  # 2 rows of 5 labels; and the same as a quarter of a batch
        torch.manual_seed(0)
        losses.append(model(ids, labels=ids, **({} if items is None else {"num_items_in_batch": items})).loss)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], 4 * losses[2])


def test_its_gradient_reaches_the_router_alone_with_the_paths() -> None:
    model, ids = path_model(**ROUTED).train(), random_ids(2, 6)
    plain_losses(model, ids[:, :-1], ids[:, 1:])[1].backward()
    for layer in model.model.stages[0].layers:
        assert layer.join.router.weight.grad.abs().max() > 0
        assert layer.join.combine.weight.grad.abs().max() > 0
    assert model.model.embedding.weight.grad.abs().max() > 0
    assert model.model.norm.weight.grad is None


def test_a_classifier_is_balanced_too() -> None:
    config = BraidConfig(path_model(**ROUTED).config.architecture, vocab_size=37, num_labels=3, pad_token_id=0)
    model = randomised(BraidForSequenceClassification(config)).double().train()
    ids, labels = random_ids(2, 6).clamp_min(1), torch.tensor([0, 2])
    ids[1, 4:] = 0
    real = (ids != 0).long()
    expected = expected_routing_loss(model.model, ids, real)
    torch.manual_seed(0)
    output = model(ids, labels=labels)
    text = torch.nn.functional.cross_entropy(output.logits.float(), labels)
    torch.testing.assert_close(output.loss, text + expected, rtol=0.0, atol=1e-5)
    evaluated = model.eval()(ids, labels=labels)
    torch.testing.assert_close(evaluated.loss, torch.nn.functional.cross_entropy(evaluated.logits.float(), labels))
