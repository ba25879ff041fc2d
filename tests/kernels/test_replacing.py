"""Faster modules in the place of a model's own: the same numbers, the same state, chosen by exact class."""

import copy
from typing import Any

import pytest
import torch

from braidlm.kernels.lower import replace_parts
from braidlm.kernels.lowered_parts import Lowered
from braidlm.kernels.replacing import FORMS
from braidlm.model.norms import RMSNorm
from tests.plain_losses import plain_losses
from tests.tiny_models import random_ids, tiny_model

EXPERTS = {"names": 3, "router": {"top_k": 2, "compute": "sparse"}}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"stages": [{"block": {"layers": 2, "share": "feeds"}}]},
    "experts": {
        "block": {"attention": {"heads": 2, "experts": EXPERTS}, "feed": {"kind": "swiglu", "experts": EXPERTS}}
    },
    "routed paths": {"stages": [{"parallel": {"paths": 3, "join": {"kind": "routed", "top_k": 2}}}]},
    "layers passed by": {"stages": [{"block": {"layers": 3}}], "dropout": {"layer": 0.5}},
}


def outcome(model: Any) -> dict[str, torch.Tensor]:
    ids = random_ids(2, 131)
    torch.manual_seed(0)
    text, added, _ = plain_losses(model, ids[:, :-1], ids[:, 1:], 260.0)
    (text if added is None else text + added).backward()
    return {"text": text.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_the_forms_of_a_cpu_equal_the_plain_forward(name: str) -> None:
    plain = tiny_model(context=256, **MODELS[name]).double().train()
    replaced = copy.deepcopy(plain)
    replace_parts(replaced)
    assert any(type(module) in FORMS.values() for module in replaced.modules())
    ours, theirs = outcome(replaced), outcome(plain)
    assert ours.keys() == theirs.keys()
    for what, expected in theirs.items():
        error = (ours[what].double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12)
        assert error < 1e-6, what  # the plain loss of the text is in float32


def test_state_and_sharing_stay() -> None:
    model = tiny_model(**MODELS["dense"])
    before, norm, state = dict(model.named_parameters()), model.model.norm, model.state_dict()
    replace_parts(model)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    first, second = model.model.stages[0].layers
    assert first.feed.out.weight is second.feed.out.weight
    twice = torch.nn.Sequential(RMSNorm(RMSNorm.Config(), 4), torch.nn.Sequential())
    twice[1].append(twice[0])
    replace_parts(twice)
    assert twice[0] is twice[1][0]
    norm.eps = 0.5
    assert model.model.norm.eps == 0.5, "the form has the state of the module that it replaced"
    replace_parts(model)
    assert type(model.model.norm) is FORMS["cpu", RMSNorm]


def test_a_subclass_is_not_replaced() -> None:
    model = tiny_model()
    model.model.norm.__class__ = other = type("OtherNorm", (RMSNorm,), {})
    replace_parts(model)
    assert type(model.model.norm) is other


@pytest.mark.parametrize("name", ["dense", "experts", "routed paths"])
def test_kernels_serve_what_was_replaced(name: str) -> None:
    """A model may be trained by its plain pass first, and then lowered."""
    model = tiny_model(context=256, **MODELS[name])
    before = Lowered(model).refusals
    replace_parts(model)
    assert Lowered(model).refusals == before
