"""Kill -9 at any moment, run the same command again: nobody can tell from the result."""

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.core.reading import read_json
from braidlm.training.loop import Trainer
from braidlm.training.saving import checkpoints
from braidlm.training.train import train
from tests.training.forked_runs import ForkedRun, fork
from tests.training.tiny_runs import records, tiny_recipe, weight_bytes, weights, written


def hard_recipe(data: dict[str, Path], out: Path, **changes: Any) -> dict[str, Any]:
    """Everything that has a state: dropout, accumulation, a mix, a budget in words, cut batches, a warm-up."""
    hard: dict[str, Any] = {
        "model": {"dropout": 0.2},
        "data": {"mix": {"weights": {"stories": 2, "maths": 1}}},
        "training": {
            "budget": "2500 words",
            "batch": 2,
            "accumulation": 2,
            "warmup": "500 words",
            "dropout": {"kind": "linear", "levels": 3},
        },
        "checkpoints": {"every": "300 words to 900, then 500", "keep": None},
        "validation": {"every": "700 words"},
        "samples": {"prompts": ["Once", ""], "tokens": 5},
        "log": {"every": 3},
    }
    return tiny_recipe(data, out, **hard | changes)


@pytest.fixture(scope="module")
def data(stories: Path, maths: Path) -> dict[str, Path]:
    return {"stories": stories, "maths": maths}


@pytest.fixture(scope="module")
def whole(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(hard_recipe(data, folder)).finished
    return folder


def assert_same_run(folder: Path, whole: Path) -> None:
    """Weights, optimizer, position, metrics and what the model folders say of themselves."""
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == ["chck_1400", "chck_1900", "chck_2400", "chck_2500", "chck_300", "chck_600", "chck_900"]
    for name in names:
        a, b = folder / "checkpoints" / name, whole / "checkpoints" / name
        assert weight_bytes(a) == weight_bytes(b), name
        assert read_json(a / "lineage.json")["training"] == read_json(b / "lineage.json")["training"]
    last = "states/chck_2500"
    kept = [
        {k: v for k, v in read_json(run / last / "position.json").items() if k != "saved"} for run in (folder, whole)
    ]
    assert kept[0] == kept[1]
    tensors = [sorted((run / last).glob("*.safetensors")) for run in (folder, whole)]
    assert [path.read_bytes() for path in tensors[0]] == [path.read_bytes() for path in tensors[1]]
    assert records(folder) == records(whole)
    assert not [*folder.rglob("*.part"), *folder.rglob("*.old")]


def wait_until(there: Callable[[], bool], run: ForkedRun) -> bool:
    """True when it is there, False when the process has ended before."""
    while run.is_alive():
        if there():
            return True
        time.sleep(0.0005)
    return False


def moments(folder: Path) -> Iterator[tuple[str, Callable[[], bool]]]:
    """States of the run folder at which the process is killed, one after another."""
    states, models = folder / "states", folder / "checkpoints"
    yield "before the first checkpoint", (folder / "metrics.jsonl").is_file
    yield "while a model folder is written", lambda: any(models.glob(".chck_*.part/config.json"))
    yield "while a state is written", lambda: any(states.glob(".chck_*.part/*.safetensors"))
    yield "between model folder and state", (models / "chck_2400").is_dir


@pytest.mark.slow
def test_kill_9_again_and_again(data: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ("train", written(hard_recipe(data, folder), tmp_path), "--device", "cpu")
    killed = 0
    for _, reached in moments(folder):
        run = fork(tmp_path / "screen", *command)
        if wait_until(reached, run):
            run.kill()
            killed += 1
    assert killed >= 3, "the runs were over before they could be killed"
    out = fork(tmp_path / "screen", *command).finish()
    assert "2,500 words." in out
    assert_same_run(folder, whole)
    steps = [(r["kind"], r["step"], r.get("prompt")) for r in records(folder)]
    assert len(steps) == len(set(steps))


def test_a_gentle_stop_saves_and_goes_on(data: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ("train", written(hard_recipe(data, folder), tmp_path), "--device", "cpu")
    run = fork(tmp_path / "screen", *command)
    assert wait_until((folder / "states" / "chck_300").is_dir, run)
    run.terminate()
    out = run.finish(code=143)
    assert "Stopped and saved as chck_" in out
    assert "The same command goes on from there." in out
    stopped = [path for path in (folder / "checkpoints").iterdir() if not (whole / "checkpoints" / path.name).is_dir()]
    train(hard_recipe(data, folder))
    assert_same_run(folder, whole)
    assert len(stopped) <= 1


class Killed(BaseException):
    """Like kill -9, at a chosen line."""


KILL_AT = [(1, "before"), (1, "between"), (1, "after"), (2, "between"), (4, "between"), (4, "after")]
"""After one checkpoint is before the next."""


class NothingRemoved(contextlib.ExitStack):
    """A process that is killed does not clean up."""

    def callback(self, *_: Any, **options: Any) -> Any:
        return None


@pytest.mark.parametrize(("number", "moment"), KILL_AT)
def test_killed_around_every_rename(
    number: int, moment: str, data: dict[str, Path], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoint `number` is cut off before it, between its model folder and its state, or right after it."""
    final = checkpoints.make_final
    calls = itertools.count()
    last = 2 * number - {"before": 2, "between": 1, "after": 0}[moment]

    def cut(part: Path, target: Path) -> None:
        if next(calls) >= last:
            raise Killed
        final(part, target)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "make_final", cut)
        patch.setattr(
            checkpoints, "contextlib", SimpleNamespace(ExitStack=NothingRemoved, suppress=contextlib.suppress)
        )
        with pytest.raises(Killed):
            train(hard_recipe(data, folder))
    train(hard_recipe(data, folder))
    assert_same_run(folder, whole)


def test_killed_while_a_checkpoint_replaces_another(data: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(hard_recipe(data, folder))
    for name in ("checkpoints", "states"):
        (folder / name / "chck_2500").rename(folder / name / ".chck_2500.old")
        (folder / name / ".chck_2500.part").mkdir()
    assert train(hard_recipe(data, folder)).model.name == "chck_2500"
    assert_same_run(folder, whole)


def test_a_stop_at_the_very_end_is_an_end(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer._step

    def stop_requested(self: Trainer) -> None:
        step(self)
        if self.progress.steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", stop_requested)
    before = signal.getsignal(signal.SIGTERM)
    assert train(tiny_recipe({"stories": stories}, tmp_path / "a", training={"budget": 3})).finished
    run = train(tiny_recipe({"stories": stories}, tmp_path / "b", training={"budget": 4}))
    assert (run.finished, run.progress.steps, run.model.name) == (False, 3, "step-000003")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_stops_at_once(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer._step

    def impatient(self: Trainer) -> None:
        step(self)
        if self.progress.steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # torchrun's echo of the first
            assert self.stop.requested()
            self.stop.requested_at -= 10
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "_step", impatient)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe({"stories": stories}, tmp_path / "run"))


def test_a_finished_run_is_left_alone(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"budget": 2})
    first = train(recipe)
    said = capsys.readouterr().out
    assert re.search(rf"Training \S+ parameters for 2 steps \(.*CPU.*\), in {tmp_path / 'run'}\n", said), said
    lines = records(tmp_path / "run")
    monkeypatch.setattr("braidlm.training.train.Trainer", None)
    monkeypatch.setattr("braidlm.training.train.open_data", None)
    again = train(recipe)  # for which neither a model is built nor data read
    assert again == first
    assert records(tmp_path / "run") == lines
    said = capsys.readouterr().out
    assert "run is finished already (2 steps)." in said
    assert "Training" not in said


def test_two_at_once_are_kept_apart(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"budget": 2})
    step = Trainer._step
    errors = []

    def twice(self: Trainer) -> None:
        with pytest.raises(BraidError) as caught:
            train(recipe)
        errors.append(str(caught.value))
        step(self)

    monkeypatch.setattr(Trainer, "_step", twice)
    assert train(recipe).finished
    assert "run: another `braid train` is at work here\nWait for it to end" in errors[0]


@pytest.mark.gpu
def test_a_run_on_a_gpu_goes_on(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With compiled and replayed steps; to rounding, for kernels may be chosen anew."""

    def recipe(name: str) -> dict[str, Any]:
        return tiny_recipe({"stories": stories}, tmp_path / name, training={"precision": "float32"})

    whole = train(recipe("whole"))
    step = Trainer._step

    def stop_requested(self: Trainer) -> None:
        step(self)
        if self.progress.steps in (5, 9):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", stop_requested)
    runs = [train(recipe("stopped")) for _ in range(3)]
    assert [run.progress.steps for run in runs] == [5, 9, 12]
    for key, tensor in weights(whole.model).items():
        torch.testing.assert_close(weights(runs[-1].model)[key], tensor, atol=1e-3, rtol=1e-2)
