"""Schedules: the learning rate and the dropout rates at every moment of a run."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.model.config.registry import Registry
from braidlm.model.config.strict import decode, encode
from braidlm.model.dropout import Dropout
from braidlm.training.amounts import Progress
from braidlm.training.features.feature import Setup
from braidlm.training.features.modules import DropoutRates, dropout_schedules
from braidlm.training.loop import Trainer
from braidlm.training.recipe import TrainingConfig
from braidlm.training.schedules import LearningRate, schedules
from braidlm.training.step.parallel import Rank
from braidlm.training.train import train
from tests.tiny_models import tiny_model
from tests.training.tiny_runs import tiny_recipe

ALL = [(registry, kind) for registry in (schedules, dropout_schedules) for kind in registry]


@pytest.mark.parametrize(("registry", "kind"), ALL, ids=lambda x: x if isinstance(x, str) else x.noun)
def test_the_contract_of_every_schedule(registry: Registry, kind: str) -> None:
    part = registry[kind]
    schedule = part(part.Config())
    values = [schedule(step / 200) for step in range(201)]
    assert all(0.0 <= value <= 1.0 for value in values)
    assert schedule(1.5) == pytest.approx(values[-1], abs=1e-9), "beyond the end nothing moves"
    turns = sum(sign != before for before, sign in pairwise(np.sign(np.diff(values)[np.diff(values) != 0])))
    assert turns == (1 if kind == "triangle" else 0), "a schedule goes one way, and only a triangle turns"
    assert part.__doc__
    key = "schedule" if registry is schedules else "dropout"
    config = decode(TrainingConfig, {"budget": 10, key: kind})
    assert decode(TrainingConfig, encode(config)) == config


def curve(spec: Any, **training: Any) -> Callable[[int], float]:
    """The rate of each step (counted from 0) of a run of 100 steps at a highest rate of 1."""
    config = decode(TrainingConfig, {"budget": 100, "optimizer": {"lr": 1.0}, "warmup": 0, "schedule": spec} | training)
    rate = LearningRate(config)
    return lambda step: rate(Progress(step, step * 10, step * 7), Progress(step + 1, step * 10 + 10, step * 7 + 7))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("constant", {0: 1.0, 50: 1.0, 99: 1.0}),
        ("cosine", {0: 1.0, 25: 0.1 + 0.9 * 0.853553, 50: 0.55, 100: 0.1}),
        ({"kind": "cosine", "final": 0.0}, {0: 1.0, 50: 0.5, 100: 0.0}),
        ("linear", {0: 1.0, 50: 0.55, 100: 0.1}),
        ({"kind": "linear", "final": 0.5}, {0: 1.0, 50: 0.75, 100: 0.5}),
        ("wsd", {0: 1.0, 50: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
        ({"kind": "wsd", "decay": 0.5, "final": 0.2}, {0: 1.0, 50: 1.0, 75: 0.6, 100: 0.2}),
    ],
    ids=str,
)
def test_rates_without_warmup(spec: Any, expected: dict[int, float]) -> None:
    rate = curve(spec)
    assert {step: rate(step) for step in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("spec", list(schedules))
@pytest.mark.parametrize("warmup", ["20 steps", "200 tokens", "140 words"])
def test_a_warmup_rises_evenly_and_the_schedule_begins_at_its_end(spec: str, warmup: str) -> None:
    rate, bare = curve(spec, warmup=warmup), curve(spec, budget=80)
    assert [rate(step) for step in range(20)] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert [rate(20 + step) for step in range(81)] == pytest.approx([bare(step) for step in range(81)])


def test_a_warmup_may_be_longer_than_the_run() -> None:
    rate = curve("cosine", warmup="200 steps")
    assert rate(0) == pytest.approx(1 / 200)
    assert rate(99) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"kind": "cosine", "final": 2}, "training.schedule.final: expected a number from 0 to 1, got 2"),
        ({"kind": "wsd", "decay": 0}, "training.schedule.decay: expected a number above 0 and at most 1, got 0"),
        ("cosin", "training.schedule: unknown schedule 'cosin'. Did you mean 'cosine'?"),
    ],
    ids=str,
)
def test_wrong_options(spec: Any, problem: str) -> None:
    with pytest.raises(BraidError) as caught:
        decode(TrainingConfig, {"budget": 1, "schedule": spec}, "training")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("constant", [1.0] * 8),
        ("early", [1.0] * 4 + [0.0] * 4),
        ({"kind": "early", "at": 0.25}, [1.0] * 2 + [0.0] * 6),
        ("late", [0.0] * 4 + [1.0] * 4),
        ({"kind": "linear", "levels": 3}, [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 1]),
        ({"kind": "linear", "levels": 1, "falling": True}, [1.0] * 4 + [0.0] * 4),
        ({"kind": "triangle", "levels": 2}, [0, 0.5, 0.5, 1, 1, 1, 0.5, 0.5]),
        ({"kind": "triangle", "levels": 4, "cycles": 2}, [0, 0.5, 1, 0.5, 0, 0.5, 1, 0.5]),
    ],
    ids=str,
)
def test_dropout_changes_in_a_run(spec: Any, expected: list[float]) -> None:
    model = tiny_model(dropout={"attention": 0.1, "residual": 0.2, "embedding": 0.3}).train()
    training = decode(TrainingConfig, {"budget": 8, "dropout": spec})
    (rates,) = DropoutRates.make(Setup(model, training, Rank(0, 1, torch.device("cpu")), torch.float32))
    dropouts = [part for part in model.modules() if isinstance(part, Dropout) and part.rate]
    assert len(dropouts) == 5
    seen: list[float] = []
    for step in range(8):
        changed, before = rates.begin_step(step, step / 8), seen[-1] if seen else 1.0
        scales = {round(part.probability / part.rate, 6) for part in dropouts}
        seen.append(scales.pop() if len(scales) == 1 else -1.0)
        recorded = any(part.is_recorded for part in dropouts)
        assert changed == (recorded and seen[-1] != before), "a captured step is recorded again"
    assert seen == pytest.approx(expected, abs=1e-6)


def test_a_run_follows_its_dropout_schedule(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    step = Trainer._step

    def watched(self: Trainer) -> None:
        step(self)
        seen.extend({part.probability for part in self.model.modules() if isinstance(part, Dropout) and part.rate})

    monkeypatch.setattr(Trainer, "_step", watched)
    training = {"budget": "4 steps", "dropout": "early"}
    train(tiny_recipe({"stories": stories}, tmp_path / "run", model={"dropout": 0.25}, training=training))
    assert seen == [0.25, 0.25, 0.0, 0.0]


def test_a_dropout_schedule_without_dropout_is_told(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_recipe({"stories": stories}, tmp_path / "run", training={"budget": 1, "dropout": "early"}))
    assert "warning: training.dropout has no effect: every dropout rate of the model is 0" in capsys.readouterr().err
