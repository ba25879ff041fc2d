"""Models whose layers share weights in the training loop: resuming, the optimizer, adapters, frozen parts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.edits.edit import edit
from braidlm.model.paths.switches import freeze
from braidlm.training.step.optimizers.contract import OptimizerConfig, make_adamw
from braidlm.training.train import train
from tests.tiny_models import tiny_model
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes, weights

SHARE = {"kind": "feeds", "lora": 2}
MODEL = {"stages": [{"block": {"layers": 3, "share": SHARE}}]}


def recipe(stories: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return tiny_recipe({"stories": stories}, out, model=MODEL, **changes)


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(recipe(stories, tmp_path / "whole")).folder
    again = recipe(stories, tmp_path / "again")
    stopped_after(5, monkeypatch, again)
    folder = train(again).folder
    last = "checkpoints/step-000012"
    assert weight_bytes(folder / last) == weight_bytes(whole / last)
    assert records(folder, "train") == records(whole, "train")
    assert not [name for name in weights(whole / last) if "layers.1.feed.out.weight" in name]


def test_a_model_that_shares_by_an_edit_is_trained_on(stories: Path, tmp_path: Path) -> None:
    run = train(tiny_recipe({"stories": stories}, tmp_path / "run", model={"stages": [{"block": {"layers": 2}}]}))
    shared = edit("share", run.folder, tmp_path / "shared", what="blocks")
    assert shared is not None
    tuned = tiny_recipe({"stories": stories}, tmp_path / "tuned", start_from=str(shared))
    del tuned["model"]
    model = load_model(train(tuned).folder / "checkpoints" / "step-000012")
    first, second = model.model.stages[0].layers
    assert first.feed.out.weight is second.feed.out.weight
    assert not torch.equal(first.feed.out.weight, load_model(shared).model.stages[0].layers[0].feed.out.weight)


def test_the_optimizer_has_every_parameter_once_and_freezing_reaches_all_uses() -> None:
    model = tiny_model(stages=[{"block": {"layers": 3, "share": "blocks"}}, "block"])
    groups = make_adamw(model, OptimizerConfig()).param_groups
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    freeze(model, ["blocks"])
    assert not any(parameter.requires_grad for parameter in model.model.stages.parameters())


def test_adapters_leave_shared_matrices_alone(stories: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = train(recipe(stories, tmp_path / "base")).folder / "checkpoints" / "step-000012"
    tuned = recipe(stories, tmp_path / "tuned", start_from=str(base), training={"lora": {"rank": 2}})
    del tuned["model"]
    before, after = weights(base), weights(train(tuned).folder / "checkpoints" / "step-000012")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(".attention." in name or ".lora." in name for name in changed), changed
    tuned["training"]["lora"]["targets"] = ["feed.out"]
    tuned["out"] = str(tmp_path / "refused")
    with pytest.raises(BraidError, match="layers share these matrices"):
        train(tuned)
