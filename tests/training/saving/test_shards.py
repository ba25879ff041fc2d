"""State that processes write in parts: another number of processes goes on from it, and it is no pickle."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from braidlm.training.recipe import decode_recipe
from braidlm.training.saving.shards import Shards
from braidlm.training.train import _train, train
from tests.training.step.processes import launch
from tests.training.tiny_runs import records, tiny_recipe, weights

EXPERTS = {"names": 4, "router": {"top_k": 2, "compute": "sparse"}}
MODEL = {"block": {"attention": {"heads": 2}, "feed": {"kind": "swiglu", "hidden": 24, "experts": EXPERTS}}}


def recipe(stories: Path, out: Path) -> dict[str, Any]:
    training = {
        "budget": "6 steps",
        "batch": 2,
        "optimizer": {"kind": "muon"},
        "average": {"kind": "ema", "rate": 0.5},
        "parallel": {"weights": "sharded", "experts": 2},
    }
    every = {"every": "2 steps"}
    return tiny_recipe({"stories": stories}, out, model=MODEL, training=training, checkpoints=every, log={"every": 1})


def whole_and_stopped(rank: Any, whole: dict[str, Any], stopped: dict[str, Any]) -> None:
    """One run to its end, and another that is stopped in its third step."""
    from braidlm.training.loop import Trainer

    _train(decode_recipe(whole), rank, False)
    step = Trainer._step

    def and_stop(self: Trainer) -> None:
        step(self)
        if self.progress.steps == 3 and rank.index == 2:
            self.stop.requested_at = 1.0

    Trainer._step = and_stop  # type: ignore[method-assign]
    assert not _train(decode_recipe(stopped), rank, False).finished


def go_on(rank: Any, recipe: dict[str, Any]) -> None:
    _train(decode_recipe(recipe), rank, False)


@pytest.mark.slow
def test_another_number_of_processes_goes_on(stories: Path, tmp_path: Path) -> None:
    whole, stopped, two, one = (recipe(stories, tmp_path / name) for name in ("whole", "stopped", "two", "one"))
    launch(4, whole_and_stopped, whole, stopped)
    saved = tmp_path / "stopped" / "states" / "step-000003"
    assert not [path for path in tmp_path.rglob("*") if path.name == ".metadata" or path.suffix in (".pt", ".distcp")]
    assert len(list((saved / "shards").iterdir())) == 4
    for other in (two, one):
        shutil.copytree(tmp_path / "stopped", other["out"])
    launch(2, go_on, two)
    one["training"] = {**one["training"], "parallel": "auto"}
    train(one)
    expected = weights(tmp_path / "whole" / "checkpoints" / "step-000006")
    for name in ("two", "one"):
        found = weights(tmp_path / name / "checkpoints" / "step-000006")
        assert set(found) == set(expected)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-5, rtol=1e-4, msg=f"{name} {key}")
        for mine, theirs in zip(records(tmp_path / name), records(tmp_path / "whole"), strict=True):
            assert mine["kind"] == theirs["kind"]
            if mine["kind"] == "train":
                assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            elif mine["kind"] == "validation":
                assert mine["bits_per_byte"] == pytest.approx(theirs["bits_per_byte"], abs=1e-5)


def test_a_file_of_one_process_is_read_as_one_part(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "step": torch.tensor(4.0), "b": torch.tensor([True, False])}
    save_file(tensors, tmp_path / "optimizer.safetensors")
    shards = Shards(tmp_path)
    assert set(shards) == set(tensors)
    assert all(torch.equal(shards[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(ValueError, match=r"it is of another model \(a is \(2, 3\) there, and \(3, 2\) here\)"):
        shards.fill({"a": torch.zeros(3, 2)})
