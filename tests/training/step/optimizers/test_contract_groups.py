"""Parameter groups: other rates and decays for some parameters, by their names."""

from pathlib import Path
from typing import Any

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.core.models.runs import newest_checkpoint
from braidlm.model.config.strict import decode
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.optimizers.contract import Optimizer, optimizers
from braidlm.training.train import train
from braidlm.training.trainable import TrainableBraid
from tests.tiny_models import random_ids, tiny_model
from tests.training.tiny_runs import stopped_after, tiny_recipe, weight_bytes

EXPERTS = {"feed": {"kind": "mlp", "hidden": 8, "experts": {"names": 3, "router": {"top_k": 2}}}}
KINDS = list(optimizers)


def made(model: BraidForCausalLM, kind: str, capturable: bool = False, **options: Any) -> Optimizer:
    config = decode(TrainingConfig, {"budget": 8, "batch": 4, "optimizer": {"kind": kind, "lr": 0.01, **options}})
    return optimizers.build(config.optimizer, model, TrainableBraid(model).matrices(), capturable)


def moved(model: BraidForCausalLM, kind: str, **options: Any) -> dict[str, torch.Tensor]:
    """How far one step moves each parameter."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, ids = made(model, kind, **options), random_ids(2, 8)
    optimizer.set_rate(0.01)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_rate_and_decay_are_those_of_the_first_pattern_that_fits(kind: str) -> None:
    plain, other = (tiny_model(block=EXPERTS) for _ in range(2))
    other.load_state_dict(plain.state_dict())
    groups = {"*.bank.up*": {"lr": 0.5}, "*.bank.*": {"lr": 0.0001}, "*embed*": {"lr": 3.0}}
    factors = {".bank.up": 0.5, ".bank.": 0.0001, "embed": 3.0}
    as_usual = moved(plain, kind, weight_decay=0.0)
    found = moved(other, kind, weight_decay=0.0, groups=groups)
    seen = set()
    for name, change in found.items():
        factor = next((factor for words, factor in factors.items() if words in name), 1.0)
        torch.testing.assert_close(change, as_usual[name] * factor, atol=2e-7, rtol=1e-3)
        seen.add(factor)
    assert seen == {0.5, 0.0001, 3.0, 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_decay_has_its_own_factor(kind: str) -> None:
    model, plain = (tiny_model(block=EXPERTS) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"weight_decay": 0.2, "groups": {"*.bank.*": {"weight_decay": 3.0}}}
    optimizer = made(model, kind, **options)
    names = {p: name for name, p in model.named_parameters()}
    decays = {
        names[p]: group["weight_decay"]
        for part in optimizer.parts
        for group in part.param_groups
        for p in group["params"]
    }
    assert decays.keys() == set(names.values())
    for name, decay in decays.items():
        if ".bank." in name:
            assert decay == pytest.approx(0.6)
        else:
            assert decay in (0.0, 0.2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    without, found = moved(plain, kind, weight_decay=0.0), moved(model, kind, **options)
    for name, decay in decays.items():
        torch.testing.assert_close(without[name] - found[name], 0.01 * decay * before[name], atol=2e-7, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_groups_goes_on_as_if_it_had_not_been_stopped(
    kind: str, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(out: str) -> dict[str, Any]:
        training = {"optimizer": {"kind": kind, "groups": {"model.stages.0.*feed.*": {"lr": 0.5, "weight_decay": 2.0}}}}
        return tiny_recipe({"stories": stories}, tmp_path / out, training=training)

    train(recipe("whole"), device="cpu")
    stopped_after(7, monkeypatch, recipe("cut"))
    train(recipe("cut"), device="cpu")
    whole, cut = (weight_bytes(newest_checkpoint(tmp_path / out)) for out in ("whole", "cut"))
    assert whole == cut


def test_what_is_refused(stories: Path, tmp_path: Path) -> None:
    with pytest.raises(BraidError, match=r"groups: 'stages.experts' fits no parameter that is trained"):
        made(tiny_model(), "adamw", groups={"stages.experts": {"lr": 2.0}})
    with pytest.raises(BraidError, match="the same for all parameters"):
        made(tiny_model(), "adamw", decay_schedule="constant", groups={"*": {"lr": 2.0}})
    training = {"optimizer": {"groups": {"*": {"rate": 2.0}}}}
    with pytest.raises(BraidError, match=r"groups.*unknown key 'rate'"):
        train(tiny_recipe({"stories": stories}, tmp_path / "run", training=training), device="cpu")
