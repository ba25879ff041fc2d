"""`--multirun`: every combination a run of its own, in order, resumable, compared at the end."""

import csv
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.sources_registry import SourcesRegistry

from braidlm.core import hydra_changes
from braidlm.core.errors import BraidError
from braidlm.studies.sweep import plan_sweep, show_sweep, sweep
from braidlm.training.loop import Trainer
from braidlm.training.train import Run, train
from tests.training.tiny_runs import records, tiny_recipe, weight_bytes, written


@pytest.fixture
def recipe(stories: Path, tmp_path: Path) -> Path:
    changes: dict[str, Any] = {"training": {"budget": 3}, "checkpoints": {"every": 2}}
    return written(tiny_recipe({"stories": stories}, tmp_path / "run, 'odd'", **changes), tmp_path)


def labels(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def table_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "runs.csv").read_text().splitlines()))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=1,2"], ["seed=1", "seed=2"]),
        (["seed=range(1,4)"], ["seed=1", "seed=2", "seed=3"]),
        (["training.batch=4", "seed=choice(5,6)"], ["seed=5", "seed=6"]),
        (
            ["training.optimizer.lr=0.001,0.01", "model.positions=rope,none"],
            [
                f"training.optimizer.lr={rate},model.positions={kind}"
                for rate in ("0.001", "0.01")
                for kind in ("rope", "none")
            ],
        ),
        (["training.budget=2 steps,100 tokens"], ["training.budget=2 steps", "training.budget=100 tokens"]),
        (["log.project='a/b','a b'"], ["log.project=a%2Fb", "log.project=a b"]),
    ],
)
def test_combinations(overrides: list[str], expected: list[str], recipe: Path, tmp_path: Path) -> None:
    runs = plan_sweep(str(recipe), overrides)
    assert [run.label for run in runs] == expected
    assert all(run.folder == tmp_path / "run, 'odd'" / run.label for run in runs)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["seed=3"], "--multirun needs something to vary\nGive several values: training.optimizer.lr=0.001,0.003"),
        (["training.batch=4,many,0"], "training.batch=many: training.batch: expected a whole number from 1 to"),
        (["training.batch=4,many,0"], "training.batch=0: training.batch: expected a whole number from 1 to"),
        (["sed=1,2"], "sed=1: unknown key 'sed'. Did you mean 'seed'?\nsed=2: unknown key"),
        (["seed=interval(1,2)"], "these overrides cannot be swept: BasicSweeper does not support sweep type"),
        (["seed='1,2"], "seed: this is not YAML: '1,2"),
    ],
)
def test_problems_are_told_before_any_run(overrides: list[str], problem: str, recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError) as caught:
        sweep(str(recipe), overrides)
    assert problem in str(caught.value)
    assert not (tmp_path / "run, 'odd'").exists()


def test_a_sweep(recipe: Path, stories: Path, tmp_path: Path, braid: Callable[..., Any]) -> None:
    answer = braid("train", recipe, "seed=1,2", "training.optimizer.lr=0.001,0.01", "--multirun", "--device", "cpu")
    assert answer.code == 0, answer.err
    folder = tmp_path / "run, 'odd'"
    names = [f"seed={seed},training.optimizer.lr={rate}" for seed in (1, 2) for rate in ("0.001", "0.01")]
    assert labels(folder) == names
    assert [f"Run {n + 1} of 4: {name}" in answer.out for n, name in enumerate(names)] == [True] * 4
    for name in names:
        bits = records(folder / name, "validation")[-1]["bits_per_byte"]
        assert f"{bits:.4f}" in answer.out
    assert [row["run"] for row in table_of(folder)] == names
    alone = tiny_recipe({"stories": stories}, tmp_path / "alone", seed=2)
    alone["training"] |= {"budget": 3, "optimizer": {"lr": 0.01}}
    assert weight_bytes(train(alone).model) == weight_bytes(folder / names[3] / "checkpoints" / "step-000003")
    again = braid("train", recipe, "seed=1,2", "training.optimizer.lr=0.001,0.01", "--multirun", "--device", "cpu")
    assert again.out.count("is finished already") == 4
    assert [row["run"] for row in table_of(folder)] == names


def test_a_sweep_in_the_folder_of_a_run(recipe: Path, tmp_path: Path, braid: Callable[..., Any]) -> None:
    """Who trained a recipe before and sweeps it now sees the runs of the sweep, and the earlier one in the files."""
    assert braid("train", recipe, "--device", "cpu").code == 0
    answer = braid("train", recipe, "seed=1,2", "--multirun", "--device", "cpu")
    assert answer.code == 0, answer.err
    folder = tmp_path / "run, 'odd'"
    names = [f"{folder.name}/seed=1", f"{folder.name}/seed=2"]
    assert [line.startswith(names[at]) for at, line in enumerate(answer.out.splitlines()[-3:-1])] == [True, True]
    assert [row["run"] for row in table_of(folder)] == [folder.name, *names]


def test_one_that_fails_stops_no_other(recipe: Path, tmp_path: Path, braid: Callable[..., Any]) -> None:
    rates = "training.optimizer.lr=1e9,0.01"
    answer = braid("train", recipe, rates, "training.warmup=0", "--multirun", "--device", "cpu")
    assert answer.code == 2
    assert "error: training.optimizer.lr=1000000000.0: " in answer.err
    assert "became infinite or not a number" in answer.err
    assert "error: 1 of 2 runs failed: training.optimizer.lr=1000000000.0" in answer.err
    assert "failed: the loss became infinite" in answer.out
    assert (tmp_path / "run, 'odd'" / "training.optimizer.lr=0.01" / "checkpoints" / "step-000003").is_dir()
    failed, done = table_of(tmp_path / "run, 'odd'")
    assert failed["training.optimizer.lr"] == "1000000000.0"
    assert failed["state"].startswith("failed: the loss became infinite or not a number at step")
    assert done["state"] == "done"


def test_one_that_never_began_is_in_the_table_until_it_does(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(content: dict[str, Any], **options: Any) -> Any:
        if content["seed"] == 2:
            raise BraidError("the disk is full", "here")
        return train(content, **options)

    with monkeypatch.context() as patch:
        patch.setattr("braidlm.studies.running.train", refuse)
        assert [run.failed for run in sweep(str(recipe), ["seed=1,2,3"])] == [False, True, False]
    rows = {row["run"]: row for row in table_of(tmp_path / "run, 'odd'")}
    assert {name: row["state"] for name, row in rows.items()} == {
        "seed=1": "done",
        "seed=3": "done",
        "seed=2": "failed: the disk is full",
    }
    assert rows["seed=2"]["hardware"] == rows["seed=2"]["bits_per_byte"] == ""
    sweep(str(recipe), ["seed=2,4"])
    states = {row["run"]: row["state"] for row in table_of(tmp_path / "run, 'odd'")}
    assert states == {f"seed={seed}": "done" for seed in (1, 2, 3, 4)}


def test_other_recipes_in_the_same_folders_are_refused_before_any_run(recipe: Path, tmp_path: Path) -> None:
    sweep(str(recipe), ["seed=1,2"])
    before = table_of(tmp_path / "run, 'odd'")
    with pytest.raises(BraidError, match=r"seed=1: this run folder belongs to another recipe .*:\n  training.batch: "):
        sweep(str(recipe), ["seed=1,5", "training.batch=2"])
    assert labels(tmp_path / "run, 'odd'") == ["seed=1", "seed=2"]
    assert table_of(tmp_path / "run, 'odd'") == before


def test_a_stop_ends_the_sweep_and_it_goes_on(
    recipe: Path, tmp_path: Path, braid: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step

    def stop_requested(self: Trainer) -> None:
        step(self)
        if self.recipe.seed == 2 and self.progress.steps == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    command = ("train", recipe, "seed=1,2,3", "--multirun", "--device", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stop_requested)
        assert braid(*command).code == 143
    assert [row["state"] for row in table_of(tmp_path / "run, 'odd'")] == ["done", "unfinished"]
    assert labels(tmp_path / "run, 'odd'") == ["seed=1", "seed=2"]
    answer = braid(*command)
    assert answer.code == 0
    assert "Going on from checkpoint step-000001" in answer.out
    assert labels(tmp_path / "run, 'odd'") == ["seed=1", "seed=2", "seed=3"]


def test_runs_without_validation_are_in_the_table(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweep(str(recipe), ["seed=1,2", "data.sets.stories.holdout=0"])
    capsys.readouterr()
    show_sweep(runs)
    shown = capsys.readouterr().out
    assert "Runs in " in shown
    assert [line.split()[:3] for line in shown.splitlines()[-3:-1]] == [["seed=1", "–", "–"], ["seed=2", "–", "–"]]
    assert [row["bits_per_byte"] for row in table_of(runs[0].folder.parent)] == ["", ""]


def test_not_under_torchrun(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BraidError, match="--multirun does not run under torchrun"):
        sweep(str(recipe), ["seed=1,2"])


def test_a_recipe_cannot_let_hydra_run_something(recipe: Path, tmp_path: Path) -> None:
    """Hydra runs what its callbacks and launchers name; it composes nothing of a recipe and its folder for them."""
    ran = tmp_path / "ran"
    runs = f"_target_: os.mkdir, path: '{ran}'"
    (tmp_path / "callbacks.yaml").write_text(f"mine: {{{runs}}}\n")
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    (tmp_path / "hydra" / "launcher" / "basic.yaml").write_text(f"# @package hydra.launcher\n{{{runs}}}\n")
    hostile = tmp_path / "hostile.yaml"
    hostile.write_text(f"defaults: [{recipe.stem}, callbacks@hydra.callbacks]\n")
    assert not [run for run in sweep(str(hostile), ["seed=1,2"]) if run.failed]
    assert not ran.exists()


def test_a_recipe_is_composed_once_for_each_combination(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[str] = []
    monkeypatch.setattr("braidlm.studies.running.train", lambda content, **options: Run(Path(), Path(), None, True))  # type: ignore[arg-type]
    compose = hydra_changes.compose_quickly
    monkeypatch.setattr(hydra_changes, "compose_quickly", lambda name, own: composed.append(name) or compose(name, own))  # type: ignore[func-returns-value]
    sweep(str(recipe), ["seed=1,2,3"])
    assert composed == [recipe.stem] * 3


def test_a_launcher_can_send_hydras_registry_to_its_jobs(recipe: Path) -> None:
    """Submitit's jobs compare it with Hydra's own classes, and fail where one was replaced."""
    plan_sweep(str(recipe), ["seed=1,2"])
    assert SourcesRegistry.instance().types["file"].__module__.startswith("hydra.")


def test_jobs_go_to_a_cluster_or_to_a_launcher(recipe: Path) -> None:
    with pytest.raises(
        BraidError, match="--cluster: jobs go to a cluster or to Hydra's launcher: hydra/launcher=basic"
    ):
        sweep(str(recipe), ["seed=1,2", "hydra/launcher=basic"], cluster="ray")
