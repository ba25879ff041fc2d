"""Runs go on: with a larger budget, with other logging, and past the checkpoints of interruptions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from braidlm.core.errors import BraidError
from braidlm.core.models.runs import newest_checkpoint
from braidlm.core.reading import read_json
from braidlm.opening.open import checkpoint_folders
from braidlm.training.amounts import Progress
from braidlm.training.recipe import decode_recipe
from braidlm.training.schedules import LearningRate
from braidlm.training.train import train
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes

Recipe = Callable[..., dict[str, Any]]


@pytest.fixture
def recipe(stories: Path, tmp_path: Path) -> Recipe:
    def make(out: str = "run", **changes: Any) -> dict[str, Any]:
        return tiny_recipe({"stories": stories}, tmp_path / out, **changes)

    return make


def models(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_larger_budget_goes_on_as_if_it_had_been_there(recipe: Recipe) -> None:
    """Where nothing depends on progress, the weights are those of the run that had it from the beginning."""
    constant = {"schedule": "constant"}
    train(recipe(training={**constant, "budget": 8}))
    longer = train(recipe(training={**constant, "budget": 12}))
    assert (longer.finished, longer.progress.steps) == (True, 12)
    at_once = train(recipe("at-once", training={**constant, "budget": 12}))
    assert weight_bytes(longer.model) == weight_bytes(at_once.model)


def test_the_schedule_is_that_of_the_larger_budget_from_there_on(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(training={"budget": 8}, log={"every": 1}))
    capsys.readouterr()
    longer = recipe(training={"budget": 12}, log={"every": 1})
    train(longer)
    shown = capsys.readouterr().out
    assert "The budget was 8 steps and is 12 steps. From here on schedules are those of the larger budget" in shown
    assert "the learning rate was 0.001 and goes on at 0.00411." in shown
    rates = {r["step"]: r["learning_rate"] for r in records(Path(longer["out"]), "train")}
    for budget, steps in ((8, range(1, 9)), (12, range(9, 13))):
        rate = LearningRate(decode_recipe(recipe(training={"budget": budget})).recipe.training)
        assert [rates[n] for n in steps] == [rate(Progress(n - 1), Progress(n)) for n in steps]
    assert yaml.safe_load((Path(longer["out"]) / "recipe.yaml").read_text())["training"]["budget"] == "12 steps"


def test_a_run_with_a_larger_budget_is_resumed_exactly(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """By words, so that the first budget ends inside a batch; the lineage says which steps had which budget."""
    for out, stop in (("whole", None), ("stopped", 14)):
        first, second = (recipe(out, training={"budget": f"{words} words"}) for words in (200, 500))
        train(first)
        if stop is not None:
            stopped_after(stop, monkeypatch, second)
        train(second)
    whole, stopped = (newest_checkpoint(recipe(out)["out"]) for out in ("whole", "stopped"))
    assert whole is not None
    assert stopped is not None
    assert weight_bytes(stopped) == weight_bytes(whole)
    training = read_json(whole / "lineage.json")["training"]
    assert read_json(stopped / "lineage.json")["training"] == training
    (earlier,) = training["earlier_budgets"]
    assert earlier["budget"] == "200 words"
    assert 0 < earlier["until_step"] < training["steps"]
    assert records(whole.parent.parent) == records(stopped.parent.parent)


@pytest.mark.parametrize("budget", ["4 steps", "9k tokens"])
def test_a_smaller_budget_or_another_unit_is_another_run(budget: str, recipe: Recipe) -> None:
    train(recipe(training={"budget": 8}))
    with pytest.raises(BraidError, match=rf"another recipe .*:\n  training\.budget: 8 steps -> {budget}\n"):
        train(recipe(training={"budget": budget}))


def test_logging_display_and_memory_are_no_part_of_a_run(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(recipe("whole"))
    stopped_after(5, monkeypatch, recipe())
    display = {
        "name": "another name",
        "log": {"every": 2},
        "samples": {"prompts": ["Once"], "tokens": 2},
        "validation": {"every": "3 steps", "tokens": 2000},
        "checkpoints": {"keep": 2},
        "training": {"activation_checkpointing": True},
    }
    run = train(recipe(**display))
    assert weight_bytes(run.model) == weight_bytes(whole.model)
    assert [r["step"] for r in records(run.folder, "train")] == [5, 6, 8, 10, 12]
    assert yaml.safe_load((run.folder / "recipe.yaml").read_text())["name"] == "another name"
    assert train(recipe(**display)).finished
    said = "Validation read at most 500 tokens of each data set and reads at most 2,000 tokens from here on."
    assert said in capsys.readouterr().out
    assert yaml.safe_load((run.folder / "recipe.yaml").read_text())["validation"]["tokens"] == 2000
    with pytest.raises(BraidError, match=r"another recipe .*:\n  validation\.half: null -> choose\n"):
        train(recipe(**display | {"validation": {"half": "choose"}}))


def test_a_run_that_was_moved_is_the_same_run(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(training={"budget": 2}))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert train(recipe("moved", training={"budget": 4})).progress.steps == 4


def test_an_interruptions_checkpoint_disappears_once_it_is_passed(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = recipe(checkpoints={"keep": None})
    folder = Path(kept["out"])
    stopped_after(5, monkeypatch, kept)
    assert models(folder) == ["step-000004", "step-000005"]
    newest = newest_checkpoint(folder)
    assert newest is not None
    assert newest.name == "step-000005", "until then it is the run's newest model"
    assert [path.name for path in checkpoint_folders(folder)] == ["step-000004"], "and no point of its curve"
    stopped_after(7, monkeypatch, kept)
    assert models(folder) == ["step-000004", "step-000007"]
    assert {path.name for path in (folder / "states").iterdir()} == {"step-000004", "step-000007"}
    train(kept)
    assert models(folder) == ["step-000004", "step-000008", "step-000012"]
    assert {path.name for path in (folder / "states").iterdir()} == {"step-000008", "step-000012"}


def test_a_stop_at_a_checkpoint_is_no_interruption(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_after(4, monkeypatch, recipe())
    train(recipe())
    assert models(Path(recipe()["out"])) == ["step-000004", "step-000008", "step-000012"]


def test_an_interruption_left_by_a_crash_is_removed_with_the_next_start(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(recipe()["out"])
    stopped_after(5, monkeypatch, recipe())
    (folder / "states" / "step-000005").rename(folder / "kept")
    train(recipe())
    assert models(folder) == ["step-000004", "step-000008", "step-000012"]
