"""Optimizers inside of a replayed step on a GPU against the same step launched operation by operation."""

from typing import Any

import numpy as np
import pytest
import torch

from braidlm.model.config.strict import decode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.features.averaging import WeightAverage
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STEPS = 10
EXPERTS = {"feed": {"kind": "mlp", "hidden": 8, "experts": {"names": 3, "router": {"top_k": 2}}}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"kind": "muon", "weight_decay": 5.0},
    "muon, its decay scheduled": {"kind": "muon", "weight_decay": 10.0, "decay_schedule": "linear"},
    "adamw, its decay scheduled": {"weight_decay": 10.0, "decay_schedule": "linear"},
}


def losses(optimizer: dict[str, Any], graph: bool, block: dict[str, Any]) -> list[float]:
    """Of each step, and at the end the sum of the averaged weights."""
    torch.manual_seed(0)
    model = BraidForCausalLM(tiny_config(block=block)).cuda()
    options = {"budget": STEPS, "batch": 4, "graph": graph, "compile": False, "optimizer": {"lr": 0.01, **optimizer}}
    config = decode(TrainingConfig, {**options, "average": {"kind": "last", "share": 0.5}})
    stepper = Stepper(TrainableBraid(model), config, Rank(0, 1, torch.device("cuda")), torch.float32)
    (average,) = (one for one in stepper.features if isinstance(one, WeightAverage))
    random, found = np.random.default_rng(0), []
    for index in range(STEPS):
        tokens = random.integers(1, model.config.vocab_size, (4, 17))
        stepper.begin_step(index, index / STEPS)
        rate, share = 0.01 / (index + 1), (index + 1) / STEPS
        report = stepper.step(tokens[:, :-1].copy(), tokens[:, 1:].copy(), 64, rate, share)
        found.append(report.loss.item())
        with average.evaluating():
            pass  # a replay after it reads the training's own weights again
    assert (stepper.graph is not None, stepper.fused is not None) == (graph, graph)
    return [*found, *(weight.square().sum().item() for weight in average.tensors)]


@pytest.mark.parametrize("block", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_replayed_step_equals_an_eager_one(optimizer: dict[str, Any], block: dict[str, Any]) -> None:
    """To the rounding of bf16, in which Muon multiplies."""
    assert losses(optimizer, True, block) == pytest.approx(losses(optimizer, False, block), rel=2e-2)


def test_a_schedule_of_the_decay_reaches_a_replayed_step() -> None:
    constant, falling = (
        losses({"weight_decay": 10.0, "decay_schedule": schedule}, True, {})
        for schedule in ("constant", {"kind": "linear", "final": 0.0})
    )
    assert constant[STEPS] < 0.8 * falling[STEPS], "the embedding"
