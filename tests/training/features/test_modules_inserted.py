"""Training a model into which modules were inserted: they open and learn, the others stay; other routing losses."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model
from braidlm.core.reading import read_json
from braidlm.edits.edit import edit
from braidlm.training.loop import Trainer
from braidlm.training.train import train
from tests.training.tiny_runs import tiny_recipe, weight_bytes, weights

EXPERTS = {"names": 3, "router": {"top_k": 1, "compute": "sparse"}}
MODEL: dict[str, Any] = {
    "block": {
        "attention": {"heads": 2, "experts": {**EXPERTS, "keys": "shared"}},
        "feed": {"kind": "swiglu", "hidden": 8, "learned_beta": True, "experts": {**EXPERTS, "shared": 8}},
    }
}
OPENING = "model.stages.0.layers.0.feed.router.opening"


@pytest.fixture(scope="module")
def grown(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two new modules for each router, of which training changes the rows of the new ones alone."""
    folder = tmp_path_factory.mktemp("grown")
    source = train(tiny_recipe({"stories": stories}, folder / "run", model=MODEL, training={"budget": 2})).model
    edit("insert", source, folder / "rows", modules=2, name="maths", router="rows", embedding="frozen")
    edit("insert", source, folder / "all", modules=2, name="maths", embedding="frozen")
    return folder


def grown_recipe(maths: Path, start: Path, out: Path, **training: Any) -> dict[str, Any]:
    training = {"batch": 8, "warmup": 0, **training}
    recipe = tiny_recipe({"maths": maths}, out, start_from=str(start), training=training)
    del recipe["model"]
    return recipe


def rows_of(name: str) -> tuple[slice, slice]:
    """The rows of a tensor that were there before, and those of the new modules."""
    if ".router.scores." in name or any(bank in name for bank in (".bank.", ".queries.", ".attention.out.")):
        return slice(0, 3), slice(3, 5)
    return slice(None), slice(0, 0)


@pytest.mark.parametrize("router", ["rows", "all"])
def test_the_old_parameters_stay_bit_for_bit(router: str, maths: Path, grown: Path, tmp_path: Path) -> None:
    """With weight decay on everything, which would move a row that has no gradient too."""
    optimizer = {"lr": 1e-2, "decay": "everything", "weight_decay": 0.5}
    run = train(grown_recipe(maths, grown / router, tmp_path / "run", optimizer=optimizer, opening=0.0))
    before, after = weights(grown / router), weights(run.model)
    changed = set()
    for name, tensor in after.items():
        old, new = rows_of(name)
        is_trained = ".router." in name and router == "all"
        if name.endswith(".opening"):
            assert tensor.tolist() == [1.0, 1.0]
        elif is_trained:
            assert not torch.equal(tensor[old], before[name][old]), name
        else:
            assert torch.equal(tensor[old], before[name][old]), name
        if not torch.equal(tensor[new], before[name][new]):
            changed.add(name.removeprefix("model.stages.0.layers.0."))
    assert {"feed.router.scores.weight", "feed.bank.out.weight", "attention.queries.weight"} <= changed


def openings(run: Path) -> list[float]:
    """How far a router was open in each checkpoint, in the order of the steps."""
    return [weights(model)[OPENING][0].item() for model in sorted((run / "checkpoints").iterdir())]


def every_step(recipe: dict[str, Any]) -> dict[str, Any]:
    return recipe | {"checkpoints": {"every": "1 steps", "keep": None}}


def test_modules_open_over_a_share_of_the_training(maths: Path, grown: Path, tmp_path: Path) -> None:
    recipe = grown_recipe(maths, grown / "rows", tmp_path / "slowly", budget=8, opening=0.5)
    slowly = train(every_step(recipe))
    assert openings(tmp_path / "slowly") == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    train(every_step(grown_recipe(maths, grown / "rows", tmp_path / "at-once", budget=2, opening=0)))
    assert openings(tmp_path / "at-once") == [1.0, 1.0]
    train(every_step(grown_recipe(maths, grown / "rows", tmp_path / "to-the-end", budget=2, opening=1)))
    assert openings(tmp_path / "to-the-end") == [0.5, 1.0]
    train(every_step(grown_recipe(maths, slowly.model, tmp_path / "again", budget=2, opening=1)))
    assert openings(tmp_path / "again") == [1.0, 1.0], "what is open never closes"


def test_a_stopped_run_goes_on_opening(
    maths: Path, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = (
        grown_recipe(maths, grown / "rows", tmp_path / name, budget=6, opening=0.9) for name in ("whole", "parts")
    )
    finished = train(whole)
    step = Trainer._step

    def stop(self: Trainer) -> None:
        step(self)
        if self.progress.steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", stop)
    assert not train(parts).finished
    resumed = train(parts)
    assert resumed.finished
    assert weight_bytes(resumed.model) == weight_bytes(finished.model)


def test_routing_losses_of_a_run_replace_the_models(
    stories: Path, maths: Path, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"load_concentration": 0.5, "new_rows": 0.25}
    run = train(grown_recipe(maths, grown / "rows", tmp_path / "run", budget=1, routing_losses=losses))
    block = read_json(run.model / "config.json")["architecture"]["stages"][0]["block"]
    for part in ("attention", "feed"):
        assert block[part]["experts"]["router"]["losses"] == losses
    fresh = tiny_recipe({"stories": stories}, tmp_path / "fresh", model=MODEL)
    fresh["training"] |= {"budget": 1, "routing_losses": {}}
    routers = load_model(train(fresh).model).model.stages[0].layers[0]
    assert routers.feed.router.config.losses == {}
    dense = tiny_recipe({"stories": stories}, tmp_path / "dense")
    dense["training"] |= {"budget": 1, "routing_losses": {"switch": 0.1}}
    train(dense)
    assert "training.routing_losses has no effect: the model has no routers" in capsys.readouterr().err


def test_the_loss_on_new_rows_holds_them_small(maths: Path, grown: Path, tmp_path: Path) -> None:
    lengths = []
    for weight in (0.0, 5.0):
        losses = {"new_rows": weight}
        out = tmp_path / f"weight-{weight:g}"
        run = train(grown_recipe(maths, grown / "rows", out, opening=0, routing_losses=losses))
        rows = [tensor[3:] for name, tensor in weights(run.model).items() if ".router.scores." in name]
        lengths.append(sum(row.square().sum().item() for row in rows))
    assert lengths[1] < 0.5 * lengths[0]


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"routing_losses": {"swich": 0.1}}, "unknown routing loss 'swich'. Did you mean 'switch'"),
        ({"routing_losses": {"switch": -1}}, "training.routing_losses.switch: expected a number from 0"),
        ({"opening": 1.5}, "training.opening: expected a number from 0 to 1"),
        ({"freeze": ["router"]}, "training.freeze"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    training: dict[str, Any], message: str, maths: Path, grown: Path, tmp_path: Path
) -> None:
    with pytest.raises(BraidError, match=message):
        train(grown_recipe(maths, grown / "rows", tmp_path / "run", **training))
    assert not (tmp_path / "run").exists()
