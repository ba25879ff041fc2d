"""Training models with paths: routing losses in every step, frozen parts that stay, temperature, two processes."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import load_model, save_model
from braidlm.core.reading import read_json
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.config.strict import decode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.joins import GumbelJoin
from braidlm.training.loop import Trainer
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.train import train
from braidlm.training.trainable import TrainableBraid
from tests.plain_losses import plain_losses
from tests.tiny_models import VOCABULARY, tiny_model
from tests.training.forked_runs import fork
from tests.training.tiny_runs import records, tiny_recipe, weight_bytes, weights, written

JOIN = {"kind": "gumbel_v1", "losses": {"load_balance": 0.1, "token_entropy": 0.01}}
PATHS: dict[str, Any] = {"stages": [{"parallel": {"paths": ["stories", "maths"], "layers": 2, "join": JOIN}}]}
PARTS = {
    "paths": ".stack.",
    "joins": (".join.", "model.norm."),
    "embedding": "model.embedding.",
    "head": "head.",
}


def path_recipe(stories: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return tiny_recipe({"stories": stories}, out, **{"model": PATHS | {"tie_embeddings": False}} | changes)


def test_routing_is_recorded(stories: Path, tmp_path: Path) -> None:
    train(path_recipe(stories, tmp_path / "run"))
    lines = records(tmp_path / "run", "train")
    assert lines
    for line in lines:
        assert 0 < line["routing_loss"] < 0.22 * np.log(3)
        assert set(line["usage"]) == {"stages.0.layers.0.join", "stages.0.layers.1.join"}
        for shares in line["usage"].values():
            assert len(shares) == 3
            assert sum(shares) == pytest.approx(1.0, abs=1e-5)
    train(tiny_recipe({"stories": stories}, tmp_path / "plain", training={"budget": 5}))
    assert all("usage" not in line and "routing_loss" not in line for line in records(tmp_path / "plain", "train"))


def test_the_loss_that_is_recorded_is_of_the_text(stories: Path, tmp_path: Path) -> None:
    """A heavy routing loss would show in a number that should be compared between models."""
    heavy = {"kind": "gumbel_v1", "sample": "softmax", "losses": {"load_balance_as_printed": 1000.0}}
    model = {"stages": [{"parallel": {"paths": 2, "join": heavy}}]}
    train(path_recipe(stories, tmp_path / "run", model=model, training={"budget": 5}))
    (line,) = records(tmp_path / "run", "train")
    assert line["routing_loss"] > 100
    assert line["loss"] < 10


def stepper(accumulation: int) -> Stepper:
    """With a routing loss that weighs as much as the text's."""
    join = {"kind": "gumbel_v1", "losses": {"load_balance": 10.0}}
    model = tiny_model(stages=[{"parallel": {"paths": 2, "join": join}}])
    options = {"budget": 1, "batch": 2, "accumulation": accumulation, "clip": None}
    return Stepper(
        TrainableBraid(model), decode(TrainingConfig, options), Rank(0, 1, torch.device("cpu")), torch.float32
    )


def test_accumulation_weighs_routing_losses_by_tokens() -> None:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, 9))
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    labels[0, 2:] = -100
    count = int((labels != -100).sum())
    two = stepper(accumulation=2)
    model = stepper(accumulation=1).model  # the same weights
    torch.manual_seed(5)
    expected = 0.0
    for part in (slice(0, 2), slice(2, 4)):
        given, targets = torch.from_numpy(inputs[part]), torch.from_numpy(labels[part])
        share = (targets != -100).sum().item() / count
        expected += share * plain_losses(model, given, targets)[1].item()
    torch.manual_seed(5)
    report = two.step(inputs, labels, count, 1e-3)
    assert report.routing_loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_routing_loss_is_in_the_gradients() -> None:
    """The step's gradient length is that of both losses together."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 9))
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    model, other = stepper(1).model, stepper(1)
    torch.manual_seed(5)
    text, routing, _ = plain_losses(model, torch.from_numpy(inputs), torch.from_numpy(labels))
    lengths = []
    for loss in (text + routing, text):
        model.zero_grad()
        loss.backward(retain_graph=True)
        lengths.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
    torch.manual_seed(5)
    report = other.step(inputs, labels, labels.size, 1e-3)
    assert report.gradient_norm.item() == pytest.approx(lengths[0], rel=1e-5)
    assert lengths[0] != pytest.approx(lengths[1], rel=1e-3)


def stop_at(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask every run to stop after so many steps."""
    step = Trainer._step

    def stop_requested(self: Trainer) -> None:
        step(self)
        if self.progress.steps == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", stop_requested)


def assert_kept(run: Path, start: dict[str, torch.Tensor], frozen: tuple[str, ...]) -> None:
    """In every checkpoint, frozen tensors are bit-equal to the start and all others are not."""
    checkpoints = sorted((run / "checkpoints").iterdir())
    assert len(checkpoints) > 1
    for checkpoint in checkpoints:
        for name, tensor in weights(checkpoint).items():
            kept = any(mark in name for mark in frozen)
            assert torch.equal(tensor, start[name]) == kept, (checkpoint.name, name)


@pytest.mark.parametrize("part", PARTS)
def test_frozen_parts_stay_through_steps_and_a_resume(
    part: str, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weight decay on everything, which would move a parameter that has no gradient too."""
    training = {"freeze": [part], "optimizer": {"lr": 1e-2, "decay": "everything"}, "warmup": 0}
    recipe = path_recipe(stories, tmp_path / "run", training=training)
    whole = path_recipe(stories, tmp_path / "whole", training=training)
    torch.manual_seed(3)  # the recipe's seed: the weights that the run begins with
    start = BraidForCausalLM(
        BraidConfig(recipe["model"], vocab_size=load_tokenizer(stories / "tokenizer").vocab_size)
    ).state_dict()
    train(whole)
    stop_at(6, monkeypatch)
    assert not train(recipe).finished
    run = train(recipe)
    assert (run.finished, run.progress.steps) == (True, 12)
    marks = PARTS[part] if isinstance(PARTS[part], tuple) else (PARTS[part],)
    assert_kept(tmp_path / "run", start, marks)
    assert weight_bytes(run.model) == weight_bytes(tmp_path / "whole" / "checkpoints" / run.model.name)


def test_what_a_folder_calls_frozen_stays(stories: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(stories / "tokenizer")
    recipe = path_recipe(stories, tmp_path / "run")
    model = BraidForCausalLM(
        BraidConfig(recipe["model"], vocab_size=tokenizer.vocab_size, frozen=["paths", "embedding"])
    )
    save_model(model, tmp_path / "start", tokenizer, {"made_by": "a test"})
    del recipe["model"]
    run = train(
        recipe | {"start_from": str(tmp_path / "start"), "training": {**recipe["training"], "freeze": ["head"]}}
    )
    assert_kept(tmp_path / "run", model.state_dict(), (".stack.", "model.embedding.", "head."))
    assert read_json(run.model / "config.json")["frozen"] == ["paths", "embedding"]
    assert load_model(run.model).head.weight.requires_grad, "what one recipe froze is not frozen for ever"


def test_a_model_to_start_from_may_be_trained_with_other_losses(stories: Path, tmp_path: Path) -> None:
    first = train(path_recipe(stories, tmp_path / "first", training={"budget": 2}))
    join = {**JOIN, "losses": {"load_balance_as_printed": 0.5}, "temperature": 0.5}
    changed = {"stages": [{"parallel": {**PATHS["stages"][0]["parallel"], "join": join}}], "tie_embeddings": False}
    again = train(
        path_recipe(stories, tmp_path / "second", model=changed, start_from=str(first.model), training={"budget": 2})
    )
    saved = read_json(again.model / "config.json")["architecture"]["stages"][0]["parallel"]["join"]
    assert saved["losses"] == {"load_balance_as_printed": 0.5}


def test_nothing_left_to_train(stories: Path, tmp_path: Path) -> None:
    recipe = path_recipe(stories, tmp_path / "run", training={"freeze": list(PARTS)})
    with pytest.raises(BraidError) as caught:
        train(recipe)
    assert str(caught.value) == "everything is frozen: there is nothing to train\nTake parts out of training.freeze."
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"training": {"freeze": ["path"]}},
            "training.freeze[0]: 'path' is not one of paths, joins, blocks, modules, routers, embedding, head.",
        ),
        (
            {"model": {"stages": [{"parallel": {"paths": ["a", "a"]}}]}},
            "model.stages[0].parallel: paths: 'a' is listed twice",
        ),
        (
            {
                "model": {
                    "stages": [{"parallel": {"paths": 2, "join": {"kind": "gumbel_v1", "losses": {"load_balanc": 1}}}}]
                }
            },
            "losses: unknown routing loss 'load_balanc'. Did you mean 'load_balance'?",
        ),
        ({"training": {"temperature": "cosin"}}, "unknown schedule 'cosin'. Did you mean 'cosine'?"),
        (
            {"model": {"stages": [{"parallel": {"paths": {"a": {"width": 9}, "b": {}}}}]}},
            "path 'a': width 9 does not divide into 2 heads; set head_dim",
        ),
        (
            {"model": {"stages": [{"parallel": {"paths": 2, "to": 8, "join": {"residual": True}}}]}},
            "a residual around the join needs equal widths, and here 16 becomes 8",
        ),
    ],
    ids=str,
)
def test_mistakes_in_a_recipe_leave_nothing_behind(
    changes: dict[str, Any], text: str, stories: Path, tmp_path: Path
) -> None:
    with pytest.raises(BraidError) as caught:
        train(path_recipe(stories, tmp_path / "run", **changes))
    assert text in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_temperature_follows_its_schedule(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    step = Trainer._step

    def watched(self: Trainer) -> None:
        step(self)
        seen.append([m.temperature_scale for m in self.model.modules() if isinstance(m, GumbelJoin)])

    monkeypatch.setattr(Trainer, "_step", watched)
    temperature = {"kind": "linear", "final": 0.5}
    train(path_recipe(stories, tmp_path / "run", training={"budget": 10, "temperature": temperature}))
    assert seen == [[pytest.approx(1 - 0.05 * number)] * 2 for number in range(10)]
    assert "has no effect" not in capsys.readouterr().err


@pytest.mark.parametrize("join", ["shared_linear", {"kind": "gumbel_v1", "sample": "softmax"}], ids=str)
def test_a_temperature_without_effect_is_told(
    join: Any, stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"stages": [{"parallel": {"paths": 2, "join": join}}]}
    train(path_recipe(stories, tmp_path / "run", model=model, training={"budget": 1, "temperature": "linear"}))
    warning = "training.temperature has no effect: no join of the model chooses by Gumbel noise"
    assert warning in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_train_a_gumbel_model(stories: Path, tmp_path: Path) -> None:
    training = {"budget": "8 steps", "batch": 2, "accumulation": 2}
    file = written(path_recipe(stories, tmp_path / "run", training=training, log={"every": 1}), tmp_path)
    fork(tmp_path / "screen", "train", file, "--device", "cpu", processes=2).finish()
    lines = records(tmp_path / "run", "train")
    assert len(lines) == 8
    for line in lines:
        assert 0 < line["routing_loss"] < 0.22 * np.log(3), "each process's share is added to one number"
        assert len(line["usage"]) == 2
    start, end = (weights(tmp_path / "run" / "checkpoints" / f"step-00000{n}") for n in (4, 8))
    assert not torch.equal(
        start["model.stages.0.layers.0.join.router.weight"], end["model.stages.0.layers.0.join.router.weight"]
    )
