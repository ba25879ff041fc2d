"""Extra losses: weighted into what is minimised, trained and saved with the run, recorded, refused where unknown."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.features.extra_losses import ExtraLoss, ExtraLossConfig, TrainingPass, extra_losses
from braidlm.training.recipe import decode_recipe
from braidlm.training.step.objective import Objective
from braidlm.training.train import train
from tests.plain_losses import plain_losses
from tests.tiny_models import random_ids, tiny_model
from tests.training.tiny_runs import records, stopped_after, tiny_recipe, weight_bytes


class NearTarget(ExtraLoss):
    """The distance of the first layer's stream from a learned vector, which follows the training in a buffer."""

    @dataclass
    class Config(ExtraLossConfig):
        text: float = 1.0
        """The factor of the text's loss."""

    needs_layers = True

    def __init__(self, config: Config, model: BraidForCausalLM):
        super().__init__(config, model)
        self.text_weight = config.text
        self.target = nn.Parameter(torch.ones(model.model.width_out))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("share", torch.zeros(()))

    def forward(self, done: TrainingPass) -> Tensor:
        distance = (done.layers[1] - self.target).square().mean(-1)
        return (distance * (done.labels != IGNORED)).sum() / done.count

    def begin_step(self, step: int, share: float) -> bool:
        self.share.fill_(share)
        return False

    @torch.no_grad()
    def end_update(self) -> None:
        self.mean.lerp_(self.target.mean(), 0.1)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    extra_losses.parts["near_target"] = NearTarget
    yield
    del extra_losses.parts["near_target"]


def recipe(stories: Path, out: Path, *losses: Any, **training: Any) -> dict[str, Any]:
    return tiny_recipe({"stories": stories}, out, training={"losses": list(losses), **training}, log={"every": 1})


def test_the_objective_gives_each_loss_of_a_pass() -> None:
    model, ids = tiny_model(stages=["block", "block"]).train(), random_ids(2, 8)
    inputs, labels, count = ids[:, :-1], ids[:, 1:], torch.tensor(14.0)
    loss = NearTarget(NearTarget.Config(), model)
    losses = Objective(model, extra={"near_target": loss})(inputs, labels, count)
    text, _, _ = plain_losses(model, inputs, labels, count)
    assert torch.equal(losses.text, text)
    states = model.model(inputs, output_hidden_states=True).hidden_states
    torch.testing.assert_close(losses.extra["near_target"], (states[1] - 1.0).square().mean())


def test_a_step_follows_the_weighted_sum(stories: Path, tmp_path: Path) -> None:
    """With no weight nothing changes; with one the extra loss falls faster; micro-batches change nothing."""
    plain = train(recipe(stories, tmp_path / "plain"))
    without = train(recipe(stories, tmp_path / "without", {"near_target": {"weight": 0.0}}))
    assert weight_bytes(plain.model) == weight_bytes(without.model)
    pulled = train(recipe(stories, tmp_path / "pulled", {"near_target": {"weight": 10.0}}))
    last = [records(run.folder, "train")[-1]["extra_losses"]["near_target"] for run in (without, pulled)]
    assert last[1] < last[0]
    apart = {"near_target": {"weight": 10.0}}
    pieces = train(recipe(stories, tmp_path / "pieces", apart, batch=2, accumulation=2))
    first = [records(run.folder, "train")[0]["extra_losses"]["near_target"] for run in (pulled, pieces)]
    assert first[0] == pytest.approx(first[1], rel=1e-5)


def test_the_texts_own_loss_may_count_less(stories: Path, tmp_path: Path) -> None:
    """Without the text's loss nothing is learned about the text."""
    mute = train(recipe(stories, tmp_path / "mute", {"near_target": {"weight": 1.0, "text": 0.0}}))
    plain = train(recipe(stories, tmp_path / "plain"))
    losses = [records(run.folder, "train")[-1]["loss"] for run in (mute, plain)]
    assert losses[1] < losses[0] - 0.1


def test_a_stopped_run_goes_on_with_the_losses_own_tensors(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(recipe(stories, tmp_path / "whole", "near_target"))
    stopped_after(7, monkeypatch, recipe(stories, tmp_path / "run", "near_target"))
    run = train(recipe(stories, tmp_path / "run", "near_target"))
    assert weight_bytes(run.model) == weight_bytes(whole.model)
    own = [load_file(next(r.folder.glob("states/step-000012")) / "losses.safetensors") for r in (run, whole)]
    assert own[0].keys() == {"near_target.target", "near_target.mean", "near_target.share"}
    assert not torch.equal(own[0]["near_target.target"], torch.ones(16))
    for name, tensor in own[0].items():
        assert torch.equal(tensor, own[1][name]), name


def test_losses_that_cannot_be(stories: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError, match=r"training.losses\[0\]: unknown extra loss 'near'"):
        decode_recipe(recipe(stories, tmp_path, "near"))
    with pytest.raises(BraidError, match="losses: 'near_target' is listed twice"):
        decode_recipe(recipe(stories, tmp_path, "near_target", {"near_target": {"weight": 2.0}}))
    with pytest.raises(BraidError, match="weight"):
        decode_recipe(recipe(stories, tmp_path, {"near_target": {"weight": -1.0}}))
