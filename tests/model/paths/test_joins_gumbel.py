"""The Gumbel join's choices: sampled in training, certain in evaluation, straight-through gradients, temperature."""

from typing import Any

import pytest
import torch
from torch import Tensor

from braidlm.model.paths.joins import GumbelJoin, scale_temperature
from tests.model.parallel_layers import first_layer, path_model
from tests.tiny_models import random_ids, tiny_model

KINDS = ["gumbel_v1", "gumbel_v2"]


def join_of(**options: Any) -> GumbelJoin:
    """A join of three choices."""
    layer, *_ = first_layer(paths=["a", "b"], join={"kind": "gumbel_v1", **options})
    return layer.join.train()


def sample(join: GumbelJoin, scores: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return join.weigh(scores)


SCORES = torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hard_sample_is_one_choice_exactly(dtype: torch.dtype) -> None:
    weights = sample(join_of(), SCORES.to(dtype))
    assert torch.equal(weights, torch.nn.functional.one_hot(weights.argmax(-1), 3).to(dtype))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_a_hard_sample_has_the_gradients_of_the_soft_one(temperature: float) -> None:
    results = []
    upstream = torch.randn_like(SCORES)
    for hard in (True, False):
        scores = SCORES.clone().requires_grad_()
        weights = sample(join_of(hard=hard, temperature=temperature), scores)
        weights.backward(upstream)
        results.append((weights.detach(), scores.grad))
    (hard_weights, hard_gradient), (soft_weights, soft_gradient) = results
    assert torch.equal(hard_weights.argmax(-1), soft_weights.argmax(-1)), "the same noise was drawn"
    torch.testing.assert_close(hard_gradient, soft_gradient)
    assert hard_gradient.abs().max() > 0


def test_a_soft_sample_is_a_distribution_of_all_choices() -> None:
    weights = sample(join_of(hard=False), SCORES)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 50))
    assert weights.min() > 0


def test_choices_come_as_often_as_they_are_probable() -> None:
    scores = torch.tensor([2.0, 0.0, -1.0]).expand(1, 40_000, 3)
    shares = sample(join_of(), scores).mean((0, 1))
    torch.testing.assert_close(shares, scores[0, 0].softmax(-1), rtol=0.0, atol=0.01)


def test_lower_temperature_is_sharper_and_leaves_the_choice_alone() -> None:
    samples = [sample(join_of(hard=False, temperature=t), SCORES) for t in (4.0, 1.0, 0.25)]
    sharpness = [weights.amax(-1).mean().item() for weights in samples]
    assert sharpness == sorted(sharpness)
    assert sharpness[0] < 0.6 < 0.85 < sharpness[-1]
    assert torch.equal(samples[0].argmax(-1), samples[-1].argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_seeded_by_torch_and_only_in_training(kind: str) -> None:
    model, ids = path_model(join=kind), random_ids(4, 12)

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(ids, use_cache=False).logits

    assert torch.equal(logits(1), logits(2)), "evaluation draws nothing"
    state = torch.get_rng_state()
    model(ids)
    assert torch.equal(torch.get_rng_state(), state)
    model.train()
    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_noise_survives_activation_checkpointing() -> None:
    """The second forward must make the choices of the first, or gradients are those of another model."""
    ids, results = random_ids(4, 10), []
    for checkpointing in (False, True):
        model = path_model(layers=3, join="gumbel_v1").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(7)
        model(ids, labels=ids).loss.backward()
        results.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=0.0, atol=1e-12)


def test_softmax_draws_nothing_and_is_the_same_in_training() -> None:
    model, ids = path_model(join={"kind": "gumbel_v2", "sample": "softmax"}), random_ids(3, 8)
    expected = model(ids, use_cache=False).logits
    state = torch.get_rng_state()
    torch.testing.assert_close(model.train()(ids).logits, expected, rtol=0.0, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("hard", [True, False])
def test_a_schedule_scales_the_temperature(hard: bool) -> None:
    scaled, direct = join_of(hard=hard, temperature=2.0), join_of(hard=hard, temperature=0.5)
    scale_temperature(scaled, 0.25)
    upstream, results = torch.randn_like(SCORES), []
    for join in (scaled, direct):
        scores = SCORES.clone().requires_grad_()
        sample(join, scores).backward(upstream)
        results.append(scores.grad)
    assert torch.equal(*results)


def test_a_schedule_leaves_evaluation_alone() -> None:
    model, ids = path_model(join="gumbel_v1"), random_ids(2, 6)
    expected = model(ids, use_cache=False).logits
    scale_temperature(model, 0.1)
    assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_a_schedule_leaves_softmax_routing_alone() -> None:
    """Its temperature is part of what the saved model computes."""
    model, ids = path_model(join={"kind": "gumbel_v1", "sample": "softmax"}), random_ids(2, 6)
    for training in (False, True):
        expected = model.train(training)(ids, use_cache=False).logits
        scale_temperature(model, 0.1)
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        scale_temperature(model, 1.0)


def test_the_record_has_the_routers_own_probabilities_and_what_was_drawn() -> None:
    model, ids = path_model(join="gumbel_v1").train(), random_ids(3, 9)
    torch.manual_seed(0)
    (first,) = model(ids).routings
    torch.manual_seed(1)
    (second,) = model(ids).routings
    assert torch.equal(first.probabilities_BTN, second.probabilities_BTN)
    assert not torch.equal(first.weights_BTN, second.weights_BTN)
    assert first.probabilities_BTN.shape == first.weights_BTN.shape == (3, 9, 3)
    assert first.probabilities_BTN.dtype == torch.float32
    assert first.losses == {}


def test_every_head_returns_the_routings() -> None:
    model, ids = path_model(layers=2, join="gumbel_v2"), random_ids(1, 5)
    assert len(model(ids).routings) == len(model.model(ids).routings) == 2
    assert tiny_model()(ids).routings is None
    *_, routings = model(ids, use_cache=False, return_dict=False)
    assert len(routings) == 2


def test_routing_under_autocast_is_computed_in_float32() -> None:
    model = path_model(join="gumbel_v1").float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = model(random_ids(1, 5), use_cache=False)
    assert output.logits.dtype == torch.bfloat16
    assert output.routings[0].probabilities_BTN.dtype == torch.float32
