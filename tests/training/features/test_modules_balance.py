"""Balancing: without a loss by moving what is chosen, and by the Switch loss; in training, of real tokens alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from braidlm.core.models.folders import load_model, save_model
from braidlm.model.config.strict import decode
from braidlm.model.errors import BraidError
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.losses import load, loads
from braidlm.model.routing.router import RouterConfig, TopKRouter
from braidlm.training.monitoring.reporter import StepMetrics
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.objective import routers
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import VOCABULARY, random_ids, randomised, tiny_model

HERE = Rank(0, 1, torch.device("cpu"))
NAMES = ("a", "b", "c", "d")


def router(rate: float = 0.01, **options: Any) -> TopKRouter:
    made = TopKRouter(RouterConfig(balance_rate=rate, **options), 8, NAMES)
    return randomised(made)  # type: ignore[no-any-return]


def test_the_crowded_become_less_likely_and_the_rare_more() -> None:
    made = router(0.01)
    made.rebalance(torch.tensor([0.7, 0.1, 0.2, 0.0]))
    torch.testing.assert_close(made.balance, torch.tensor([-0.01, 0.01, 0.01, 0.01]))
    made.rebalance(torch.full((4,), 0.25))
    torch.testing.assert_close(made.balance, torch.tensor([-0.01, 0.01, 0.01, 0.01]))  # even loads move nothing
    unbalanced = router(0.0)
    unbalanced.rebalance(torch.tensor([0.7, 0.1, 0.2, 0.0]))
    assert unbalanced.balance is None


def test_it_changes_what_is_chosen_and_not_what_it_counts() -> None:
    made, hidden = router(top_k=1, renormalise=False), torch.randn(2, 9, 8)
    before = made(hidden)
    made.balance = torch.tensor([0.0, 0.0, 2.0, 0.0])
    after = made(hidden)
    assert (after.chosen_BTK == 2).all()
    assert not (before.chosen_BTK == 2).all()
    torch.testing.assert_close(after.probabilities_BTN, before.probabilities_BTN)
    torch.testing.assert_close(after.weights_BTK[..., 0], after.probabilities_BTN[..., 2])


def test_it_has_no_gradient_and_changes_none() -> None:
    hidden, found = torch.randn(2, 9, 8), []
    for balance in (0.0, 0.3):  # the same for all: nothing else is chosen
        made = router(top_k=2)
        made.balance += balance
        assert "balance" in dict(made.named_buffers())
        assert "balance" not in dict(made.named_parameters())
        (made(hidden).weights_BTK * torch.tensor([1.0, 3.0])).sum().backward()
        found.append([p.grad for p in made.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert found[0][0].abs().max() > 0


def routed(join: dict[str, Any], wanted: float = 3.0) -> BraidForCausalLM:
    """Two layers of four paths whose routers begin by wanting the first path so much."""
    join = {"kind": "routed", "losses": {}, **join}
    model = tiny_model(stages=[{"parallel": {"layers": 2, "paths": 4, "join": join}}])
    with torch.no_grad():
        for made in routers(model):
            made.scores.bias.copy_(torch.tensor([wanted, wanted / 3, 0.0, 0.0]))
    return model


def test_a_folder_keeps_it(tmp_path: Path) -> None:
    model = routed({"balance_rate": 0.01})
    for number, made in enumerate(routers(model)):
        made.balance.copy_(torch.tensor([0.5, -0.25, 0.125, 0.0]) + number)  # type: ignore[union-attr]
    loaded = load_model(save_model(model, tmp_path / "m", None, {"made_by": "a test"}))
    for ours, theirs in zip(routers(model), routers(loaded), strict=True):
        assert torch.equal(ours.balance, theirs.balance)  # type: ignore[arg-type]
    ids = random_ids(2, 8)
    for ours, theirs in zip(model(ids).routings, loaded(ids).routings, strict=True):
        assert torch.equal(ours.chosen_BTK, theirs.chosen_BTK)


def batch(seed: int, rows: int = 8, length: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a language in which the next token follows from the last."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCABULARY, (rows, length + 1))
    for position in range(1, length + 1):
        follows = random.random(rows) < 0.8
        tokens[:, position] = np.where(follows, (tokens[:, position - 1] * 5 + 3) % VOCABULARY, tokens[:, position])
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def trained(model: BraidForCausalLM, steps: int, lr: float = 3e-3, **training: Any) -> dict[str, Tensor]:
    """The load of each router after so many steps."""
    options = {"budget": steps, "batch": 8, "optimizer": {"lr": lr}} | training
    stepper = Stepper(TrainableBraid(model), decode(TrainingConfig, options), HERE, torch.float32)
    for step in range(steps):
        inputs, labels = batch(step)
        stepper.step(inputs, labels, labels.size, lr)
    inputs, labels = batch(10_000, rows=32)
    with torch.no_grad():
        routings = model.eval()(torch.from_numpy(inputs), use_cache=False).routings
    return loads(routings, torch.from_numpy(labels) != IGNORED)


@pytest.mark.parametrize("per", ["block", "sublayer"])
def test_loads_become_more_even_in_training(per: str) -> None:
    skewed = trained(routed({"top_k": 1, "per": per, "balance_rate": 0.005}), 1, lr=1e-3)
    even = trained(routed({"top_k": 1, "per": per, "balance_rate": 0.005}), 120, lr=1e-3)
    alone = trained(routed({"top_k": 1, "per": per}), 30, lr=1e-3)
    assert len(even) == (2 if per == "block" else 4)
    for name, found in even.items():
        assert skewed[name].max() > 0.6, name
        assert found.max() < 0.45, name
        assert found.min() > 0.1, name
    assert max(float(found.max()) for found in alone.values()) > 0.6, "what is left alone stays skewed"


def one_step(inputs: np.ndarray, labels: np.ndarray, **training: Any) -> list[Tensor]:
    """What balances each router after one step."""
    model = routed({"balance_rate": 0.01}, wanted=0.0)
    options = {"budget": 1, "batch": len(inputs), "optimizer": {"lr": 1e-3}} | training
    stepper = Stepper(TrainableBraid(model), decode(TrainingConfig, options), HERE, torch.float32)
    stepper.step(inputs, labels, int((labels != IGNORED).sum()), 1e-3)
    return [made.balance for made in routers(model) if made.balance is not None]


def test_a_step_moves_each_router_once_by_what_was_chosen() -> None:
    inputs, labels = batch(0)
    model = routed({"balance_rate": 0.01}, wanted=0.0).train()
    real = torch.ones(labels.shape)
    with torch.no_grad():
        routings = model(torch.from_numpy(inputs), use_cache=False).routings
    expected = [0.01 * (0.25 - load(routing, real)).sign() for routing in routings]
    for parts in (1, 2, 4):
        for found, wanted in zip(one_step(inputs, labels, accumulation=parts), expected, strict=True):
            torch.testing.assert_close(found, wanted)


def test_padding_does_not_count() -> None:
    inputs, labels = batch(1)
    inputs[:2], inputs[2:] = 5, 7  # so that the real tokens choose other blocks than the others do
    full = one_step(inputs, labels.copy())
    labels[2:] = IGNORED
    for found, wanted in zip(one_step(inputs, labels), one_step(inputs[:2], labels[:2]), strict=True):
        torch.testing.assert_close(found, wanted)
    assert any(not torch.equal(a, b) for a, b in zip(full, one_step(inputs, labels), strict=True)), (
        "or it shows nothing"
    )


def test_the_switch_loss_keeps_every_block_in_use() -> None:
    """And without it, from the same weights and batches, one is lost."""
    kept = trained(routed({"losses": {"switch": 0.2}}), 50, lr=1e-2)
    for name, found in kept.items():
        assert found.min() > 0.05, name
    alone = trained(routed({}), 25, lr=1e-2)
    assert min(float(found.min()) for found in alone.values()) < 0.05


def test_training_says_which_router_went_astray() -> None:
    model = routed({})
    stepper = Stepper(TrainableBraid(model), decode(TrainingConfig, {"budget": 1, "batch": 8}), HERE, torch.float32)
    readings = StepMetrics(HERE)
    inputs, labels = batch(0)
    report = stepper.step(inputs, labels, labels.size, 1e-3)
    name = "stages.0.layers.1.join.router"
    report.usage[name] = torch.full((4,), torch.nan)  # as a GPU reports it, where nobody looks inside a step
    report.loss = torch.tensor(torch.nan)
    readings.unread.append((7, report))
    said = readings.read()
    assert said is not None
    assert "the loss became infinite or not a number at step 7" in said
    assert f"where router {name} gives scores that are not numbers" in said
    with torch.no_grad():
        model.model.get_submodule(name).scores.bias[0] = torch.nan
    with pytest.raises(BraidError, match=r"stages\.0\.layers\.1\.join\.router: the router's scores are not numbers"):
        stepper.step(inputs, labels, labels.size, 1e-3)
