"""Weight decay with a schedule of its own."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from braidlm.model.config.strict import decode, encode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.optimizers.contract import Optimizer, decay_outlasts_rate, optimizers
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.train import train
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import VOCABULARY, tiny_model
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes

KINDS = list(optimizers)


def config(kind: str, **options: Any) -> TrainingConfig:
    return decode(TrainingConfig, {"budget": 8, "batch": 4, "optimizer": {"kind": kind, **options}})


def made(model: BraidForCausalLM, kind: str, **options: Any) -> Optimizer:
    return optimizers.build(config(kind, **options).optimizer, model, TrainableBraid(model).matrices())


def test_the_option_is_read_back() -> None:
    written = config("adamw", decay_schedule={"kind": "linear", "final": 0.5})
    assert decode(TrainingConfig, encode(written)) == written
    assert config("adamw").optimizer.options.decay_schedule is None


ENDS = {"kind": "linear", "final": 0.0}


@pytest.mark.parametrize(
    ("rate", "options", "is_told"),
    [
        (ENDS, {"decay_schedule": "constant"}, True),
        (ENDS, {"decay_schedule": {"kind": "cosine", "final": 0.1}}, True),
        (ENDS, {"decay_schedule": ENDS}, False),
        (ENDS, {"decay_schedule": "constant", "weight_decay": 0.0}, False),
        (ENDS, {}, False),
        ("constant", {"decay_schedule": "constant"}, False),
    ],
)
def test_a_decay_that_outlasts_the_rate_is_told(rate: Any, options: dict[str, Any], is_told: bool) -> None:
    """It took a model of best/search from 1.40 bits per byte to 3.02."""
    training = decode(TrainingConfig, {"budget": 8, "schedule": rate, "optimizer": {"kind": "muon", **options}})
    assert (decay_outlasts_rate(training.optimizer.options, training.schedule) is not None) == is_told


def test_a_training_tells_that_its_decay_outlasts_the_rate(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"budget": "1 step", "schedule": ENDS, "optimizer": {"kind": "adamw", "decay_schedule": "constant"}}
    train(tiny_recipe({"stories": stories}, tmp_path / "run", training=spec))
    assert "decay_schedule: the learning rate ends at 0 and the decay does not" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("schedule", "shares"),
    [("constant", [1.0, 1.0, 1.0, 1.0]), ({"kind": "linear", "final": 0.0}, [1.0, 0.75, 0.5, 0.25])],
    ids=["constant", "linear"],
)
def test_the_decay_is_its_own_whatever_the_rate(kind: str, schedule: Any, shares: list[float]) -> None:
    """Without gradients weights change by decay alone."""
    model = tiny_model()
    matrix, vector = model.model.stages[0].layers[0].feed.out.weight, model.model.norm.weight
    before = [p.detach().clone() for p in (matrix, vector)]
    optimizer = made(model, kind, lr=0.1, weight_decay=0.5, decay_schedule=schedule)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for step in range(4):
        optimizer.begin_step(step / 4)
        optimizer.set_rate([0.0, 1e-3, 0.1, 0.01][step])
        optimizer.step()
    left = math.prod(1 - 0.05 * share for share in shares)
    torch.testing.assert_close(matrix.detach(), before[0] * left, rtol=1e-5, atol=0)
    assert torch.equal(vector, before[1])


def test_what_has_no_gradient_does_not_decay() -> None:
    model = tiny_model()
    unused = model.model.stages[0].layers[0].feed.out.weight
    before = unused.detach().clone()
    optimizer = made(model, "adamw", lr=0.1, weight_decay=0.5, decay_schedule="constant")
    for parameter in model.parameters():
        parameter.grad = None if parameter is unused else torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(unused, before)


@pytest.mark.parametrize("kind", KINDS)
def test_at_a_constant_rate_it_is_the_decay_of_the_optimizer(kind: str) -> None:
    models = [tiny_model(), tiny_model()]
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, 9))
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    for model, schedule in zip(models, (None, "constant"), strict=True):
        options = config(kind, lr=0.01, weight_decay=2.0, decay_schedule=schedule)
        stepper = Stepper(TrainableBraid(model), options, Rank(0, 1, torch.device("cpu")), torch.float32)
        for _ in range(5):
            stepper.step(inputs, labels, labels.size, 0.01)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_decay_as_the_optimizer_does(kind: str) -> None:
    fused_step = pytest.importorskip("braidlm.kernels.optimizers.fused_step", reason="it needs Triton")
    models = [tiny_model(), tiny_model()]
    options = config(kind, lr=0.01, weight_decay=10.0, decay_schedule={"kind": "linear", "final": 0.0}).optimizer
    ours, theirs = (optimizers.build(options, model, TrainableBraid(model).matrices(), True) for model in models)
    fused = fused_step.FusedStep(ours.parts, ours.decay_factors)
    for step in range(3):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.begin_step(step / 3)
            optimizer.set_rate(0.001 * (step + 1))
        fused.step(None) if fused.ready else ours.step()
        theirs.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_the_factor_keeps_its_memory() -> None:
    """A captured step reads it there."""
    decay = made(tiny_model(), "muon", lr=0.1, weight_decay=1.0, decay_schedule="linear").decay
    assert decay is not None
    memory = decay.factor.data_ptr()
    decay.begin_step(1.0)
    assert (decay.factor.data_ptr(), decay.factor.item()) == (memory, pytest.approx(0.99))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    kind: str, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(folder: str) -> dict[str, Any]:
        optimizer = {"kind": kind, "weight_decay": 5.0, "decay_schedule": {"kind": "wsd", "decay": 0.8}}
        return tiny_recipe({"stories": stories}, tmp_path / folder, training={"optimizer": optimizer})

    whole = train(recipe("whole")).folder
    stopped_after(5, monkeypatch, recipe("again"))
    folder = train(recipe("again")).folder
    last = "checkpoints/step-000012"
    assert weight_bytes(folder / last) == weight_bytes(whole / last)
    assert records(folder, "train") == records(whole, "train")
