"""Checkpoints: damage is recognised and named, the one before is used, and the result is the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from braidlm.core.errors import BraidError
from braidlm.core.files import write_json
from braidlm.core.models.folders import load_model
from braidlm.core.models.runs import read_metrics
from braidlm.core.reading import read_json, read_yaml
from braidlm.opening import names
from braidlm.training import loop
from braidlm.training.recipe import decode_recipe
from braidlm.training.saving import checkpoints
from braidlm.training.saving.checkpoints import Checkpoints, manifest_of
from braidlm.training.step.parallel import Rank
from braidlm.training.train import train, with_rows_of_run
from tests.training.tiny_runs import records, tiny_recipe, weight_bytes

CPU = torch.device("cpu")
HERE = Rank(0, 1, CPU)


@pytest.fixture(scope="module")
def finished(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_recipe({"stories": stories}, folder, model={"dropout": 0.1}))
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The finished run in a folder where it may be damaged."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(finished), str(folder)))
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


MODEL, STATE = "checkpoints/step-000012", "states/step-000012"
DAMAGES = {
    "truncated weights": (truncate, f"{MODEL}/model.safetensors", "model.safetensors is damaged"),
    "a flipped bit in the weights": (flip, f"{MODEL}/model.safetensors", "model.safetensors is damaged"),
    "no weights": (Path.unlink, f"{MODEL}/model.safetensors", "model.safetensors is missing"),
    "no model folder": (shutil.rmtree, MODEL, "model.safetensors is missing"),
    "another configuration": (flip, f"{MODEL}/config.json", "config.json is damaged"),
    "a flipped bit in the optimizer": (flip, f"{STATE}/optimizer.safetensors", "optimizer.safetensors is damaged"),
    "no optimizer": (Path.unlink, f"{STATE}/optimizer.safetensors", "optimizer.safetensors is missing"),
    "a truncated position": (truncate, f"{STATE}/position.json", "position.json is damaged"),
    "a position that was saved at no time": (
        lambda path: path.write_text('{"saved": "soon"}'),
        f"{STATE}/position.json",
        "position.json is damaged",
    ),
    "no position": (Path.unlink, f"{STATE}/position.json", "position.json is missing"),
    "a truncated manifest": (truncate, f"{STATE}/manifest.json", "manifest.json: this is not valid JSON"),
    "no manifest": (Path.unlink, f"{STATE}/manifest.json", "manifest.json: this file does not exist"),
    "an odd manifest": (
        lambda path: path.write_text("[]"),
        f"{STATE}/manifest.json",
        "manifest.json: expected an object",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(damage: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harm, file, problem = DAMAGES[damage]
    harm(copy / file)
    assert Checkpoints(copy, HERE, 3).newest_good() == "step-000008"
    assert f"warning: checkpoint step-000012 cannot be used ({problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    ["no model folder", "no optimizer", "a truncated position", "a position that was saved at no time", "no manifest"],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    damage: str, copy: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, file, problem = DAMAGES[damage]
    harm(copy / file)
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
    assert train(recipe).finished
    shown = capsys.readouterr()
    assert f"warning: checkpoint step-000012 cannot be used ({problem}" in shown.err
    assert "Going on from checkpoint step-000008 (step 8)." in shown.out
    assert weight_bytes(copy / MODEL) == weight_bytes(finished / MODEL)
    assert records(copy) == records(finished)
    assert Checkpoints(copy, Rank(0, 1, CPU), 3).newest_good() == "step-000012"


def test_a_run_whose_states_are_all_damaged_is_not_trained_again(
    copy: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for state in (copy / "states").iterdir():
        flip(state / "optimizer.safetensors")
    states = sorted((copy / "states").iterdir())
    with pytest.raises(BraidError, match="no saved state that it could go on from") as caught:
        train(yaml.safe_load((copy / "recipe.yaml").read_text()))
    assert "--fresh removes the run that is there" in str(caught.value)
    assert capsys.readouterr().err.count("cannot be used") == 2
    assert sorted((copy / "states").iterdir()) == states
    assert weight_bytes(copy / MODEL) == weight_bytes(finished / MODEL)
    assert records(copy) == records(finished)


def test_a_damaged_state_does_not_push_out_a_good_one(stories: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = tiny_recipe({"stories": stories}, folder, training={"budget": 8}, checkpoints={"every": "2 steps"})
    train(recipe)
    assert sorted(p.name for p in (folder / "states").iterdir()) == ["step-000006", "step-000008"]
    flip(folder / "states/step-000008/position.json")
    train(recipe)
    checkpoints = Checkpoints(folder, Rank(0, 1, CPU), 3)
    assert checkpoints._in_order() == ["step-000006", "step-000008"]
    flip(folder / "states/step-000008/position.json")
    assert checkpoints.newest_good() == "step-000006"


@pytest.mark.parametrize(
    ("keep", "models"),
    [(None, [2, 4, 6, 8, 9]), (3, [6, 8, 9]), (1, [8, 9])],
)
def test_only_the_newest_are_kept(keep: int | None, models: list[int], stories: Path, tmp_path: Path) -> None:
    changes = {"every": "2 steps", "keep": keep}
    train(tiny_recipe({"stories": stories}, tmp_path / "run", training={"budget": 9}, checkpoints=changes))
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == [f"step-{n:06d}" for n in models]
    assert sorted(p.name for p in (tmp_path / "run/states").iterdir()) == ["step-000008", "step-000009"]


def test_the_best_is_kept_beside_the_newest(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worse_and_worse(run: Path, kind: str) -> list[dict[str, Any]]:
        return [record | {"bits_per_byte": float(record["step"])} for record in read_metrics(run, kind)]

    monkeypatch.setattr(names, "read_metrics", worse_and_worse)
    run, every = tmp_path / "run", {"every": "2 steps"}
    train(
        tiny_recipe(
            {"stories": stories}, run, training={"budget": 9}, checkpoints={**every, "keep": 2}, validation=every
        )
    )
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000008", "step-000009"]
    assert names.best_checkpoint(run).name == "step-000002"


def test_a_run_whose_states_were_removed_is_not_trained_again(copy: Path, finished: Path) -> None:
    shutil.rmtree(copy / "states")
    with pytest.raises(BraidError, match="no saved state that it could go on from") as caught:
        train(yaml.safe_load((copy / "recipe.yaml").read_text()))
    assert f"start_from={copy / MODEL} name=NAME" in str(caught.value)
    assert weight_bytes(copy / MODEL) == weight_bytes(finished / MODEL)


def test_a_run_on_other_data_is_not_told_to_remove_its_states(copy: Path) -> None:
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
    recipe["training"]["budget"] = "20 steps"
    state = copy / "states/step-000012"
    position = json.loads((state / "position.json").read_text())
    position["loader"]["facts"] = {**position["loader"]["facts"], "length": 7}
    write_json(state / "position.json", position)
    (state / "manifest.json").unlink()
    write_json(state / "manifest.json", manifest_of(state, copy / MODEL))
    with pytest.raises(BraidError, match="belongs to other data") as caught:
        train(recipe)
    assert "Resume with the data and the settings of the run that was saved" in str(caught.value)
    assert "Remove this folder" not in str(caught.value)


def test_a_checkpoint_is_a_model_folder_that_says_where_it_came_from(finished: Path) -> None:
    model = load_model(finished / MODEL)
    assert model.config.eos_token_id is not None
    lineage = read_json(finished / MODEL / "lineage.json")
    assert lineage["made_by"] == "braid train"
    assert lineage["training"]["steps"] == 12
    assert lineage["training"]["bits_per_byte"] == records(finished, "validation")[-1]["bits_per_byte"]
    assert lineage["recipe"] == yaml.safe_load((finished / "recipe.yaml").read_text())
    assert lineage["sources"][0]["data"] == "stories"
    assert json.dumps(lineage)


def test_nothing_is_printed_by_torch(stories: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path / "run", training={"budget": 2}, checkpoints={"every": 1})
    train(recipe)
    shutil.rmtree(tmp_path / "run/states/step-000002")
    train(recipe)
    assert not [str(w.message) for w in recwarn if "distributed" in str(w.message)]


def test_another_number_of_processes_shares_the_rows(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Checkpoints(copy, HERE, 3).rows_of_a_step()
    recipe = decode_recipe(read_yaml(copy / "recipe.yaml")).recipe
    assert with_rows_of_run(recipe, copy, HERE) is recipe
    assert rows == recipe.training.batch * recipe.training.accumulation
    shared = with_rows_of_run(recipe, copy, Rank(1, 2, CPU)).training
    assert (shared.batch * 2, shared.accumulation) == (recipe.training.batch, recipe.training.accumulation)
    assert f"A step of this run has {rows} rows" in capsys.readouterr().out
    with pytest.raises(BraidError, match=f"a step of this run has {rows} rows, which do not divide among 7 processes"):
        with_rows_of_run(recipe, copy, Rank(0, 7, CPU))


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    final = checkpoints.make_final
    sync: Callable[[Path], None] = checkpoints.make_final.__globals__["_sync"]

    def watched(path: Path) -> None:
        synced.append(Path(path).name)
        sync(path)

    def make(part: Path, target: Path) -> None:
        synced.clear()
        final(part, target)
        written = {path.name for path in target.rglob("*") if path.is_file()}
        assert written <= set(synced)
        assert synced[-1] == target.parent.name

    monkeypatch.setitem(final.__globals__, "_sync", watched)
    monkeypatch.setattr(checkpoints, "make_final", make)
    assert loop.Checkpoints is Checkpoints
    train(tiny_recipe({"stories": stories}, tmp_path / "run", training={"budget": 1}))
