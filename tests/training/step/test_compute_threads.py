"""The number of CPU threads: the fastest, one that somebody chose, or the one that a run began with."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.reading import read_json
from braidlm.training.loop import Trainer
from braidlm.training.step import compute
from braidlm.training.step.compute import StarvedThreads, choose_threads, fastest, using_threads
from braidlm.training.step.parallel import Rank
from braidlm.training.train import train
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import tiny_model
from tests.training.tiny_runs import tiny_recipe, weight_bytes

CPU = Rank(0, 1, torch.device("cpu"))
SHAPE = (2, 8)


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine of four cores where nobody chose a number."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with using_threads(4):
        yield


TIMES = {
    "a large model on a quiet machine": ({8: 1.0, 4: 1.9, 2: 3.7, 1: 7.0}, 8, [8, 4]),
    "a tiny model": ({8: 1.2, 4: 1.1, 2: 1.0, 1: 0.9}, 1, [8, 4, 2, 1]),
    "a busy machine": ({8: 9.0, 4: 3.0, 2: 1.0, 1: 1.05}, 1, [8, 4, 2, 1]),
    "something between": ({8: 2.0, 4: 1.0, 2: 1.5, 1: 3.0}, 4, [8, 4, 2]),
    "a little slower each time": ({8: 1.0, 4: 1.1, 2: 1.2, 1: 1.3}, 4, [8, 4, 2]),
}


@pytest.mark.parametrize("case", TIMES)
def test_the_fastest_number_is_found_from_above(case: str) -> None:
    times, best, tried = TIMES[case]
    seen: list[int] = []

    def seconds() -> float:
        seen.append(torch.get_num_threads())
        return times[torch.get_num_threads()]

    assert fastest(seconds, 8) == best
    assert list(dict.fromkeys(seen)) == tried
    assert torch.get_num_threads() == 4


def test_a_measurement_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(dropout=0.5).train()
    state = torch.get_rng_state()
    chosen = choose_threads(TrainableBraid(model), SHAPE, CPU, None, None)
    assert chosen in (1, 2, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert f"Computing with {chosen} CPU thread" in capsys.readouterr().out


def test_who_chooses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe before the checkpoint, the checkpoint before the environment, and a GPU needs no number."""
    model = tiny_model()
    monkeypatch.setattr(compute, "fastest", lambda *_: pytest.fail("nothing is left to measure"))
    assert choose_threads(TrainableBraid(model), SHAPE, CPU, 3, 2) == 3
    assert choose_threads(TrainableBraid(model), SHAPE, CPU, None, 2) == 2
    assert capsys.readouterr().out == (
        "Computing with 3 CPU threads, as the recipe says.\nComputing with 2 CPU threads, as before.\n"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert choose_threads(TrainableBraid(model), SHAPE, CPU, None, None) == 4
    monkeypatch.delenv("OMP_NUM_THREADS")
    with using_threads(1):
        assert choose_threads(TrainableBraid(model), SHAPE, CPU, None, None) == 1
    assert choose_threads(TrainableBraid(model), SHAPE, Rank(0, 1, torch.device("cuda")), 3, 2) is None
    assert capsys.readouterr().out == ""


READINGS = {
    "a quiet machine": (2, [(1.9, 60.0), (1.7, 60.0)], None),
    "a core that is taken": (2, [(1.9, 5.0), (0.7, 6.0), (0.6, 6.0)], "training.threads=1 "),
    "taken a moment only": (2, [(0.7, 6.0), (1.8, 6.0), (0.7, 6.0), (1.8, 6.0)], None),
    "seconds after it was taken": (2, [(0.7, 2.0), (0.7, 2.0)], None),
    "one long reading": (2, [(0.7, 60.0)], None),
    "some of many cores": (16, [(8.9, 6.0), (8.9, 6.0)], "training.threads=8 "),
    "a single thread, which waits for none": (1, [(0.3, 60.0), (0.3, 60.0)], None),
}


@pytest.mark.parametrize("case", READINGS)
def test_threads_that_wait_for_cores_are_noticed_once(case: str) -> None:
    count, readings, advice = READINGS[case]
    monitor = StarvedThreads()
    warnings = [monitor.update(count, cores, seconds) for cores, seconds in readings]
    assert warnings[:-1] == [None] * (len(readings) - 1)
    assert warnings[-1] is None if advice is None else f"{count} CPU threads get the time of " in str(warnings[-1])
    assert advice is None or advice in str(warnings[-1])
    assert advice is None or monitor.update(count, *readings[-1]) is None


def test_a_run_says_that_its_threads_wait(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compute, "PATIENCE", 0.0)
    monkeypatch.setattr(compute, "fastest", lambda *_: 2)
    monkeypatch.setattr("time.process_time", lambda: 0.0)  # as if others had all of the cores
    short = {"training": {"budget": 4}, "log": {"every": 1}}
    train(tiny_recipe({"stories": stories}, tmp_path / "run", **short))
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert "2 CPU threads get the time of 0.0 cores" in warning
    assert "the same command with training.threads=1 goes on from there" in warning


def test_a_resumed_run_keeps_the_number_that_it_began_with(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = iter([2, 2, 1, 1])
    monkeypatch.setattr(compute, "fastest", lambda *_: next(chosen))
    short: dict[str, Any] = {"training": {"budget": 4}, "validation": {"every": 4, "tokens": 50}}
    whole = train(tiny_recipe({"stories": stories}, tmp_path / "whole", **short))
    step, used = Trainer._step, set()

    def watched(self: Trainer) -> None:
        used.add(torch.get_num_threads())
        step(self)
        if self.progress.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", watched)
    recipe = tiny_recipe({"stories": stories}, tmp_path / "stopped", **short)
    assert not train(recipe).finished
    resumed = train(recipe)
    assert used == {2}
    assert torch.get_num_threads() == 4
    assert weight_bytes(resumed.model) == weight_bytes(whole.model)
    assert read_json(resumed.folder / "states" / resumed.model.name / "position.json")["threads"] == 2
    short["training"] = {"budget": 5, "threads": 1}
    train(tiny_recipe({"stories": stories}, tmp_path / "stopped", **short))
    assert used == {1, 2}, "who names another number gets it, in the same run"
