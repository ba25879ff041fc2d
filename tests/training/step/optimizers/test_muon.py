"""Muon in a recipe: what it trains, runs that go on, and that it learns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim

from braidlm.core.errors import BraidError
from braidlm.kernels.optimizers.muon import BatchedMuon
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import decode, encode
from braidlm.model.paths.switches import freeze
from braidlm.training.amounts import Amount
from braidlm.training.recipe import TrainingConfig, decode_recipe
from braidlm.training.step.optimizers.contract import Optimizer, OptimizerConfig, optimizers
from braidlm.training.step.optimizers.muon import MuonConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.train import train
from braidlm.training.trainable import TrainableBraid
from tests.tiny_decoders import save_decoder
from tests.tiny_models import VOCABULARY, tiny_model
from tests.training.forked_runs import fork
from tests.training.tiny_runs import decoder_recipe, records, stopped_after, tiny_recipe, weight_bytes, weights, written

EXPERTS: dict[str, Any] = {"feed": {"kind": "mlp", "hidden": 8, "experts": {"names": 3, "router": {"top_k": 2}}}}
JOIN = {"kind": "routed", "top_k": 2, "compute": "sparse"}  # two runs on a busy machine might measure and differ
ROUTED: dict[str, Any] = {
    "stages": ["block", {"parallel": {"paths": 3, "layers": 1, "join": JOIN}}, "block"],
    "positions": "learned",
}
SHARED: dict[str, Any] = {"stages": [{"block": {"layers": 3, "share": {"kind": "feeds", "lora": 2}}}]}
MODELS = {"dense": {}, "experts": {"block": EXPERTS}, "paths": ROUTED, "shared": SHARED}


def made(model: Any, **options: Any) -> Optimizer:
    choice = decode(TrainingConfig, {"budget": 1, "optimizer": {"kind": "muon", **options}}).optimizer
    return optimizers.build(choice, model, TrainableBraid(model).matrices())


def names_of(part: optim.Optimizer, model: nn.Module) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for group in part.param_groups for p in group["params"]}


@pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS)
def test_matrices_of_blocks_are_muons_and_all_else_is_adamws(architecture: dict[str, Any]) -> None:
    model = tiny_model(**architecture)
    adamw, muon = made(model).parts
    assert isinstance(adamw, optim.AdamW)
    assert isinstance(muon, BatchedMuon)
    by_adamw, by_muon = names_of(adamw, model), names_of(muon, model)
    assert by_adamw | by_muon == {name for name, _ in model.named_parameters()}
    assert not by_adamw & by_muon
    assert all(name.startswith("model.stages.") and name.endswith("weight") for name in by_muon)
    assert not [name for name in by_muon if "norm" in name or "router" in name or "score" in name]
    left = [name for name in by_adamw if "stages" in name and not any(x in name for x in ("norm", "bias", "router"))]
    assert left == []


def test_frozen_matrices_are_left_out_and_decay_is_as_adamws() -> None:
    model = tiny_model(**ROUTED)
    freeze(model, ["paths"])
    optimizer = made(model, weight_decay=0.3)
    trained = set().union(*(names_of(part, model) for part in optimizer.parts))
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert [[group["weight_decay"] for group in part.param_groups] for part in optimizer.parts] == [[0.3, 0.0], [0.3]]


def test_only_matrices_are_trained_where_all_else_is_frozen() -> None:
    model = tiny_model()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.model.stages[0].layers[0].feed.out.weight)
    (muon,) = made(model).parts
    assert names_of(muon, model) == {"model.stages.0.layers.0.feed.out.weight"}


def test_both_rates_follow_the_schedule() -> None:
    optimizer = made(tiny_model(), lr=0.02, adamw_lr=0.001)
    optimizer.set_rate(0.01)
    adamw, muon = optimizer.parts
    assert [group["lr"] for group in adamw.param_groups] == pytest.approx([0.0005, 0.0005])
    assert [group["lr"] for group in muon.param_groups] == [0.01]


def test_recipes_without_a_kind_are_adamws() -> None:
    assert decode(TrainingConfig, {"budget": 1, "optimizer": {"lr": 0.5}}).optimizer == Choice(
        "adamw", OptimizerConfig(lr=0.5)
    )
    assert TrainingConfig(Amount(1)).optimizer == decode(TrainingConfig, {"budget": 1}).optimizer
    config = decode(TrainingConfig, {"budget": 1, "optimizer": {"kind": "muon", "lr": 0.5, "momentum": 0.9}})
    assert config.optimizer == Choice("muon", MuonConfig(lr=0.5, momentum=0.9))
    assert decode(TrainingConfig, encode(config)) == config
    with pytest.raises(BraidError, match="unknown key 'momentum'"):
        decode(TrainingConfig, {"budget": 1, "optimizer": {"momentum": 0.9}})


def test_adapters_are_not_muons(stories: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe({"stories": stories}, tmp_path, training={"lora": {"rank": 2}, "optimizer": {"kind": "muon"}})
    with pytest.raises(BraidError, match=r"training\.lora: Muon trains whole matrices"):
        decode_recipe({**recipe, "start_from": "somewhere"})


def test_gradients_of_both_are_clipped_together() -> None:
    """The norm is that of all gradients, and with a clip of nearly nothing Muon's momentum is nearly nothing."""
    model = tiny_model()
    config = decode(TrainingConfig, {"budget": 1, "batch": 4, "clip": 1e-6, "optimizer": {"kind": "muon"}})
    stepper = Stepper(TrainableBraid(model), config, Rank(0, 1, torch.device("cpu")), torch.float32)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, 8))
    report = stepper.step(tokens, tokens, tokens.size, 1e-3)
    _, muon = stepper.optimizer.parts
    total = sum(state["momentum_buffer"].square().sum() for state in muon.state.values())
    assert report.gradient_norm > 0.1
    assert 0 < float(total) ** 0.5 <= 0.05 * 1e-6 * 1.001


@pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS)
def test_it_learns_by_heart(architecture: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = tiny_model(**architecture)
    options = {"budget": 40, "batch": 4, "optimizer": {"kind": "muon", "lr": 0.02}}
    stepper = Stepper(
        TrainableBraid(model), decode(TrainingConfig, options), Rank(0, 1, torch.device("cpu")), torch.float32
    )
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, 9))
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    losses = [stepper.step(inputs, labels, labels.size, 0.02).loss.item() for _ in range(40)]
    assert losses[0] > 3
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["dense", "paths"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    name: str, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(folder: str) -> dict[str, Any]:
        training = {"optimizer": {"kind": "muon", "momentum": 0.9}}
        return tiny_recipe({"stories": stories}, tmp_path / folder, model=MODELS[name], training=training)

    whole = train(recipe("whole")).folder
    stopped_after(5, monkeypatch, recipe("again"))
    folder = train(recipe("again")).folder
    last = "checkpoints/step-000012"
    assert weight_bytes(folder / last) == weight_bytes(whole / last)
    assert records(folder, "train") == records(whole, "train")
    state = "states/step-000012/optimizer.safetensors"
    assert (folder / state).read_bytes() == (whole / state).read_bytes()


def test_the_layers_of_a_decoder_are_muons_too(stories: Path, tmp_path: Path) -> None:
    base = save_decoder("gpt2", stories / "tokenizer", tmp_path / "base")
    training = {"budget": 2, "optimizer": {"kind": "muon"}, "average": "ema"}
    run = train(decoder_recipe(stories, tmp_path / "run", base, training=training))
    state = load_file(run.folder / "states" / run.model.name / "optimizer.safetensors")
    by_muon = [key for key in state if key.endswith(".momentum_buffer")]
    assert len(by_muon) == 3 * 4
    assert all(key.startswith("transformer.h.") and "ln" not in key and state[key].ndim == 2 for key in by_muon)
    assert "transformer.wte.weight.exp_avg" in state


@pytest.mark.slow
def test_two_processes_equal_twice_the_batch(stories: Path, tmp_path: Path) -> None:
    """Muon, a decay of its own and averaged weights."""

    def recipe(folder: str, batch: int) -> dict[str, Any]:
        optimizer = {"kind": "muon", "decay_schedule": "linear"}
        training = {"batch": batch, "optimizer": optimizer, "average": {"kind": "last", "share": 0.5}}
        return tiny_recipe({"stories": stories}, tmp_path / folder, training=training)

    alone = weights(train(recipe("alone", 4)).model)
    fork(tmp_path / "screen", "train", written(recipe("two", 2), tmp_path), "--device", "cpu", processes=2).finish()
    for name, tensor in weights(tmp_path / "two" / "checkpoints" / "step-000012").items():
        torch.testing.assert_close(tensor, alone[name], atol=1e-5, rtol=1e-5)
