"""A run folder from a stranger: nothing in its training state runs; states of earlier versions are still resumed."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.reading import read_json
from braidlm.training.saving.state import read_distcp
from braidlm.training.train import train
from tests.training.tiny_runs import weights

FOLDERS = Path(__file__).parent / "folders"
"""Written by an earlier version: runs of 8 steps, stopped at step 4, by one process and by two."""
STATE = "states/step-000004"


def opened(kind: str, folder: Path) -> dict[str, Any]:
    """A copy of an earlier version's run in `folder`; returns its recipe."""
    shutil.copytree(FOLDERS / kind, folder)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("RUN", str(folder)).replace("DATA", str(FOLDERS / "data")))
    return yaml.safe_load(recipe.read_text())


def signed(state: Path) -> None:
    """Update the manifest's hashes to the files as they are."""
    manifest = json.loads((state / "manifest.json").read_text())
    manifest["files"] = {name: sha256_of(state / name) for name in manifest["files"]}
    (state / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = opened("one-process", tmp_path / "old")
    old = train(recipe)
    assert "Going on from checkpoint step-000004 (step 4)." in capsys.readouterr().out
    new = train({**recipe, "out": str(tmp_path / "new")})
    for name, tensor in weights(new.model).items():  # the two may have been on different processors
        torch.testing.assert_close(weights(old.model)[name], tensor, atol=1e-5, rtol=1e-5)
    assert not [*tmp_path.rglob("states/step-000008/tensors")], "it is saved in the format of today"


@pytest.mark.parametrize("process", [0, 1])
def test_each_of_several_processes_finds_its_own_state(process: int) -> None:
    tensors = read_distcp(FOLDERS / "two-processes" / STATE / "tensors", ("optimizer.", f"random.{process}."))
    assert [name for name in tensors if name.startswith("random.")] == [f"random.{process}.cpu"]
    assert tensors["optimizer.model.embedding.weight.step"] == 4.0
    assert tensors["optimizer.model.embedding.weight.exp_avg"].abs().sum() > 0


class Command:
    """A pickle of this runs a command when it is opened."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


class Constructed:
    """A pickle of this calls a class that seems harmless."""

    def __reduce__(self) -> Any:
        return torch.nn.Linear, (3, 3)


def plant_command(state: Path, mark: Path) -> None:
    (state / "tensors" / ".metadata").write_bytes(pickle.dumps(Command(mark)))


def plant_command_in_a_tensor(state: Path, mark: Path) -> None:
    torch.save(Command(mark), state / "tensors" / "__0_0.distcp")


def plant_another_class(state: Path, _: Path) -> None:
    (state / "tensors" / ".metadata").write_bytes(pickle.dumps(Constructed()))


def plant_another_file(state: Path, mark: Path) -> None:
    metadata = (state / "tensors" / ".metadata").read_bytes()
    other = "../position.j"  # as long as the name that it replaces
    (state / "tensors" / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", other.encode()[:12]))


def cut(state: Path, _: Path) -> None:
    (state / "tensors" / ".metadata").write_bytes((state / "tensors" / ".metadata").read_bytes()[:100])


HOSTILE: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a command": (plant_command, "it holds posix.system, which is no part of a state and was not run"),
    "a command among the tensors": (plant_command_in_a_tensor, "cannot be used"),
    "another class": (plant_another_class, "it holds torch.nn.modules.linear.Linear, which is no part of a state"),
    "another file": (plant_another_file, "it names a file of another folder (../position.)"),
    "a part": (cut, "cannot be used"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_in_a_hostile_state_runs(kind: str, tmp_path: Path) -> None:
    plant, message = HOSTILE[kind]
    recipe = opened("one-process", tmp_path / "run")
    plant(tmp_path / "run" / STATE, tmp_path / "ran")
    signed(tmp_path / "run" / STATE)
    with pytest.raises(BraidError) as caught:
        train(recipe)
    assert message in caught.value.what
    assert "Remove this folder to go on from the checkpoint before it" in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def of_today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of an earlier version after it has gone on."""
    folder = tmp_path_factory.mktemp("today") / "run"
    train(opened("one-process", folder))
    return folder


@pytest.mark.parametrize("name", ["optimizer.safetensors", "random-0.safetensors"])
@pytest.mark.parametrize("how", ["a pickle", "other tensors"])
def test_a_changed_state_of_today_is_refused(name: str, how: str, of_today: Path, tmp_path: Path) -> None:
    shutil.copytree(of_today, tmp_path / "run")
    recipe = yaml.safe_load((of_today / "recipe.yaml").read_text()) | {"out": str(tmp_path / "run")}
    recipe["training"]["budget"] = "9 steps"  # of a finished run no state is read
    state = tmp_path / "run" / "states" / "step-000008"
    assert sorted(read_json(state / "manifest.json")["files"]) == [
        "optimizer.safetensors",
        "position.json",
        "random-0.safetensors",
    ]
    if how == "a pickle":
        (state / name).write_bytes(pickle.dumps(Command(tmp_path / "ran")))
    else:
        save_file(
            {key: tensor.reshape(-1)[:1].clone() for key, tensor in load_file(state / name).items()}, state / name
        )
    signed(state)
    with pytest.raises(BraidError, match="this saved state cannot be used: "):
        train(recipe)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"progress": {"stride": 3}}, "stride"),
        ({"loader": None}, "NoneType"),
        ({"loader": {}}, "there is no 'facts'"),
        ({"threads": "x"}, "x is no number of threads"),
    ],
)
def test_a_changed_position_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    recipe = opened("one-process", tmp_path / "run")
    position = tmp_path / "run" / STATE / "position.json"
    position.write_text(json.dumps(read_json(position) | changes))
    signed(position.parent)
    with pytest.raises(BraidError) as caught:
        train(recipe)
    assert "this saved state cannot be used: " in caught.value.what
    assert problem in caught.value.what
