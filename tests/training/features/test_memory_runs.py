"""Runs with a memory: stopped anywhere they go on as if never stopped, and settings that do not fit are refused."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.training.features.memory import memory_length
from braidlm.training.recipe import decode_recipe
from braidlm.training.saving import checkpoints
from braidlm.training.train import train
from tests.training.forked_runs import fork
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes, weights, written


def memory_recipe(data: dict[str, Path], out: Path, **training: Any) -> dict[str, Any]:
    """Everything that a memory meets: micro-batches, cut batches, a mix, dropout."""
    defaults = {"budget": "2200 words", "batch": 2, "accumulation": 2}
    return tiny_recipe(
        data,
        out,
        model={"dropout": 0.1},
        data={"chunking": "consecutive"},
        training=defaults | training,
        checkpoints={"every": "500 words", "keep": None},
        validation={"every": "700 words"},
    )


@pytest.fixture(scope="module")
def data(stories: Path, maths: Path) -> dict[str, Path]:
    return {"stories": stories, "maths": maths}


@pytest.fixture(scope="module")
def whole(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was never stopped."""
    folder = tmp_path_factory.mktemp("memory") / "run"
    assert train(memory_recipe(data, folder)).finished
    return folder


def assert_same_run(folder: Path, whole: Path) -> None:
    for name in ("chck_500", "chck_1500", "chck_2200"):
        assert weight_bytes(folder / "checkpoints" / name) == weight_bytes(whole / "checkpoints" / name), name
    tensors = [sorted((run / "states" / "chck_2200").glob("*.safetensors")) for run in (folder, whole)]
    assert [path.name for path in tensors[1]] == [
        "memory-0.safetensors",
        "optimizer.safetensors",
        "random-0.safetensors",
    ]
    assert [path.read_bytes() for path in tensors[0]] == [path.read_bytes() for path in tensors[1]]
    assert records(folder) == records(whole)


@pytest.mark.parametrize("steps", [1, 7, 8])
def test_a_stop_after_any_step_changes_nothing(
    steps: int, data: dict[str, Path], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_after(steps, monkeypatch, memory_recipe(data, tmp_path / "run"))
    train(memory_recipe(data, tmp_path / "run"))
    assert_same_run(tmp_path / "run", whole)


class Killed(BaseException):
    """Like kill -9, at a chosen line."""


@pytest.mark.parametrize("renames", [3, 5])
def test_killed_while_a_checkpoint_is_made_final(
    renames: int, data: dict[str, Path], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, calls = checkpoints.make_final, itertools.count()

    def cut(part: Path, target: Path) -> None:
        if next(calls) >= renames:
            raise Killed
        final(part, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "make_final", cut)
        with pytest.raises(Killed):
            train(memory_recipe(data, tmp_path / "run"))
    train(memory_recipe(data, tmp_path / "run"))
    assert_same_run(tmp_path / "run", whole)


def test_a_memory_matters_from_the_second_step_on(data: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    train(memory_recipe(data, tmp_path / "run", memory=0))
    assert not list((tmp_path / "run" / "states").rglob("memory-*"))
    ours, theirs = (records(folder, "train") for folder in (whole, tmp_path / "run"))
    assert [r["words"] for r in ours] == [r["words"] for r in theirs], "the batches are the same"
    assert ours[0]["loss"] != theirs[0]["loss"]


def test_a_damaged_memory_is_found(
    data: dict[str, Path], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "states" / "chck_2200" / "memory-0.safetensors").write_bytes(b"")
    train(memory_recipe(data, tmp_path / "run"))
    assert "memory-0.safetensors is damaged" in capsys.readouterr().err
    assert_same_run(tmp_path / "run", whole)


def test_a_memory_is_as_long_as_a_chunk_where_rows_go_on(data: dict[str, Path], tmp_path: Path) -> None:
    def length(content: dict[str, Any]) -> int:
        recipe = decode_recipe(content).recipe
        return memory_length(recipe.training, recipe.data)

    recipe = memory_recipe(data, tmp_path)
    assert length(recipe) == 32
    recipe["training"]["memory"] = 7
    assert length(recipe) == 7
    assert length(tiny_recipe(data, tmp_path)) == 0


def test_positions_are_checked_before_data_is_prepared(tmp_path: Path, braid: Callable[..., Any]) -> None:
    recipe = tiny_recipe({}, tmp_path / "run", model={"positions": "learned"}, data={"chunking": "consecutive"})
    recipe["data"] |= {"sets": {"stories": {"source": "stories"}}, "cache": str(tmp_path / "cache")}
    assert "cannot attend to the text before" in braid("train", written(recipe, tmp_path)).err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"training": {"memory": 8}}, "only where it goes on with its text"),
        ({"training": {"memory": -1}, "data": {"chunking": "consecutive"}}, "training.memory: "),
        ({"data": {"chunking": "consecutive"}, "model": {"positions": "learned"}}, "cannot attend to the text before"),
    ],
)
def test_settings_that_do_not_fit_leave_nothing_behind(
    changes: dict[str, Any], problem: str, stories: Path, tmp_path: Path, braid: Callable[..., Any]
) -> None:
    answer = braid("train", written(tiny_recipe({"stories": stories}, tmp_path / "run", **changes), tmp_path))
    assert answer.code == 2
    assert problem in answer.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_have_texts_of_their_own(stories: Path, tmp_path: Path) -> None:
    """Together they have the rows of one process, in its order."""

    def recipe(name: str, batch: int) -> dict[str, Any]:
        made = memory_recipe({"stories": stories}, tmp_path / name, batch=batch, accumulation=1)
        return made | {"model": {**made["model"], "dropout": 0.0}}

    alone = train(recipe("alone", 4))
    file = written(recipe("two", 2), tmp_path)
    fork(tmp_path / "screen", "train", file, "--device", "cpu", processes=2).finish()
    saved = tmp_path / "two" / "states" / "chck_2200"
    assert sorted(path.name for path in saved.glob("memory-*")) == ["memory-0.safetensors", "memory-1.safetensors"]
    for name, tensor in weights(alone.model).items():
        found = weights(tmp_path / "two" / "checkpoints" / "chck_2200")[name]
        torch.testing.assert_close(found, tensor, atol=1e-5, rtol=1e-5)


def test_another_batch_cannot_take_a_memory(data: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(BraidError):
        train(memory_recipe(data, tmp_path / "run", batch=3, budget="3000 words"))
