"""Gradients of single rows: at once as one by one, whatever the model is made of; and what cannot be done at once."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from braidlm.core.models.adapters import adaptable
from braidlm.kernels.replacing import FORMS, plain_parts
from braidlm.model.heads.losses import IGNORED
from braidlm.training.decoder import DecoderObjective
from braidlm.training.lora import Adapter
from braidlm.training.recipe import LoraTrainingConfig
from braidlm.training.step.objective import Objective
from braidlm.training.step.row_gradients import gradients_at_once, gradients_one_by_one
from braidlm.training.trainable import TrainableBraid
from tests.tiny_decoders import CONFIGS
from tests.tiny_models import random_ids, tiny_model

COUNT = torch.tensor(12.0)
PATHS = [{"name": name, "feed": {"kind": "swiglu", "hidden": size}} for name, size in (("a", 8), ("b", 12))]
MODELS: dict[str, dict[str, Any]] = {
    "rms": {"block": {"norm": "rms"}, "positions": "rope"},
    "layer norms": {"block": {"norm": "layer", "feed": {"kind": "mlp", "hidden": 24}}, "positions": "learned"},
    "own head": {"tie_embeddings": False},
    "shared keys and a window": {"block": {"attention": {"heads": 4, "kv_heads": 2, "window": 4}}},
    "stick-breaking": {"block": {"attention": {"heads": 2, "kind": "stick_breaking"}}},
    "stacked paths": {"stages": [{"parallel": {"layers": 1, "join": "shared_linear", "paths": 2}}]},
    "paths of two sizes": {"stages": [{"parallel": {"layers": 1, "join": "add", "paths": PATHS}}]},
}
EXPERTS = {"names": 3, "router": {"losses": {}}}
DEPENDENT: dict[str, dict[str, Any]] = {
    "experts": {"block": {"feed": {"hidden": 8, "experts": EXPERTS}}},
    "mixture of depths": {"stages": [{"mixture_of_depths": {"layers": 2, "capacity": 0.5, "every": 2}}]},
}


def rows() -> tuple[Tensor, Tensor]:
    """Inputs and labels, of which a row has few and another one none."""
    tokens = random_ids(4, 13)
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    labels[1, 3:] = labels[2] = IGNORED
    return inputs, labels


def trained(objective: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in objective.named_parameters() if parameter.requires_grad}


def one_by_one(objective: nn.Module) -> tuple[list[Tensor], Tensor]:
    found = list(gradients_one_by_one(objective, trained(objective), *rows(), COUNT))
    gradients = [torch.cat(each) for each in zip(*(gradients for gradients, _ in found), strict=True)]
    return gradients, sum(losses.text.detach() for _, losses in found)


def check(objective: nn.Module, atol: float = 1e-10, rtol: float = 1e-8) -> None:
    ((gradients, losses),) = gradients_at_once(objective, trained(objective), *rows(), COUNT)
    wanted, text = one_by_one(objective)
    torch.testing.assert_close(gradients, wanted, atol=atol, rtol=rtol)
    torch.testing.assert_close(losses.text, text)
    assert all(not gradient[2].any() for gradient in gradients), "a row without labels"


@pytest.mark.parametrize("kind", MODELS)
def test_rows_at_once_have_the_gradients_of_rows_one_by_one(kind: str) -> None:
    check(TrainableBraid(tiny_model(**MODELS[kind]).double().train()).objective())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_decoders_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    check(DecoderObjective(AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()), atol=1e-6, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_the_package_that_counts_the_noise_finds_the_same_gradients() -> None:
    opacus = pytest.importorskip("opacus")
    objective = Objective(tiny_model(block={"norm": "rms"}).train())
    ((ours, _),) = gradients_at_once(objective, trained(objective), *rows(), COUNT)
    inputs, labels = rows()
    sampled = opacus.GradSampleModule(objective.model, loss_reduction="sum", strict=False)
    logits = sampled(input_ids=inputs, use_cache=False).logits
    (nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / COUNT).backward()
    theirs = [parameter.grad_sample for parameter in trained(objective).values()]
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)


def test_frozen_parameters_have_none() -> None:
    model = tiny_model().double().train()
    model.model.stages[0].requires_grad_(False)
    objective = TrainableBraid(model).objective()
    assert len(trained(objective)) < len(list(objective.parameters()))
    check(objective)


def test_adapters() -> None:
    model = tiny_model().double().train()
    adapter = Adapter(model, LoraTrainingConfig(rank=2, targets=adaptable(model)[0]), {})
    check(TrainableBraid(model, adapter).objective())


@pytest.mark.parametrize("kind", DEPENDENT)
def test_what_depends_on_values_is_refused_and_leaves_the_model_as_it_was(kind: str) -> None:
    objective = TrainableBraid(tiny_model(**DEPENDENT[kind]).double().train()).objective()
    before, _ = one_by_one(objective)
    with pytest.raises(RuntimeError):
        list(gradients_at_once(objective, trained(objective), *rows(), COUNT))
    torch.testing.assert_close(one_by_one(objective)[0], before)


@pytest.mark.parametrize("kind", ["residual", "layer"])
def test_every_row_has_dropout_of_its_own(kind: str) -> None:
    objective = TrainableBraid(tiny_model(dropout={kind: 0.5}).train()).objective()
    inputs, labels = (tensor[:1].expand(16, -1) for tensor in rows())
    torch.manual_seed(0)
    ((gradients, _),) = gradients_at_once(objective, trained(objective), inputs, labels, COUNT)
    assert len({gradient.sum().item() for gradient in gradients[-1]}) > 1


def test_bf16() -> None:
    objective = TrainableBraid(tiny_model().train()).objective()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        ((gradients, _),) = gradients_at_once(objective, trained(objective), *rows(), COUNT)
        wanted, _ = one_by_one(objective)
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert float((ours - theirs).norm()) <= 0.03 * float(theirs.norm())


def test_parts_are_plain_inside_of_the_block_alone() -> None:
    objective = TrainableBraid(tiny_model(block={"norm": "rms"}).train()).objective()
    kinds = {type(module) for module in objective.modules()}
    assert kinds & set(FORMS.values())
    with contextlib.suppress(KeyError), plain_parts(objective):
        assert not {type(module) for module in objective.modules()} & set(FORMS.values())
        raise KeyError
    assert {type(module) for module in objective.modules()} == kinds
