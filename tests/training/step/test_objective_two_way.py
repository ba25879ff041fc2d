"""Passes in which some rows see both ways: the fast one against masks, those against one made by hand, and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.step.objective import check_two_way, needs_masks, two_way_mask, two_way_options
from tests.tiny_models import random_ids, tiny_model

EXPERTS = {"names": 3, "router": {"top_k": 2}}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "grouped queries": {"block": {"attention": {"heads": 4, "kv_heads": 2}}},
    "learned positions": {"positions": "learned"},
    "stacked paths": {"stages": [{"parallel": {"paths": 2}}]},
    "routed paths": {"stages": [{"parallel": {"paths": 3, "join": "routed"}}]},
    "experts": {"block": {"attention": {"heads": 4, "experts": EXPERTS}, "feed": {"kind": "mlp", "experts": EXPERTS}}},
    "shared keys": {"block": {"attention": {"heads": 4, "experts": {**EXPERTS, "keys": "shared"}}}},
    "dropped layers": {"dropout": {"layer": 0.5}, "stages": [{"block": {"layers": 3}}]},
}
MASKED: dict[str, dict[str, Any]] = {
    "window": {"block": {"attention": {"heads": 4, "window": 3}}},
    "scope": {"stages": [{"parallel": {"paths": 3, "join": {"kind": "routed", "scope": "routed"}}}]},
}


def stream(model: BraidForCausalLM, ids: Tensor, by_masks: bool) -> Tensor:
    """The stream of a pass whose last two rows see both ways."""
    return model.run(ids, **two_way_options(model.model, ids, 2, by_masks)).hidden


def outcome(model: BraidForCausalLM, ids: Tensor, by_masks: bool) -> dict[str, Tensor]:
    """The stream and every gradient of a pass whose last two rows see both ways."""
    model.zero_grad()
    torch.manual_seed(0)
    hidden = stream(model, ids, by_masks)
    (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach(), **found}


@pytest.mark.parametrize("compute", ["sparse", "dense"])
@pytest.mark.parametrize(("name", "time"), [*((name, 8) for name in SHAPES), ("routed paths", 130), ("experts", 130)])
def test_the_fast_pass_is_that_by_masks(name: str, time: int, compute: str) -> None:
    """Long rows too, whose routed queries a CPU computes in a way of its own where all rows are causal."""
    model, ids = tiny_model(torch.float64, **SHAPES[name]).train(), random_ids(3, time)
    for part in model.modules():
        if hasattr(part, "compute"):
            part.compute = compute
    assert not needs_masks(model.model)
    fast, slow = (outcome(model, ids, by_masks) for by_masks in (False, True))
    assert fast.keys() == slow.keys()
    for key, tensor in fast.items():
        torch.testing.assert_close(tensor, slow[key], msg=key)


@pytest.mark.parametrize("name", [*SHAPES, *MASKED])
def test_one_row_is_causal_and_the_others_see_what_comes(name: str) -> None:
    model, ids = tiny_model(torch.float64, **(SHAPES | MASKED)[name]), random_ids(3, 8)
    by_masks = needs_masks(model.model)
    assert by_masks == (name in MASKED)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 37
    before, after = (stream(model, each, by_masks) for each in (ids, changed))
    torch.testing.assert_close(before[0], model.run(ids[:1]).hidden[0])
    moved = (before - after).abs().amax(-1) > 1e-9
    assert not moved[0, :-1].any()
    if name != "scope":  # there a token is seen by those that chose the same path
        assert moved[1:, -2:].all()
    if name == "window":
        assert not moved[1:, :3].any(), "two layers of a window of three reach four tokens back"


def test_masks_are_those_made_by_hand() -> None:
    one, both = [[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 1, 1]] * 3
    assert two_way_mask(None, torch.arange(3), 2, 3).long().tolist() == [[one], [both], [both]]
    near, sides = [[1, 0, 0], [1, 1, 0], [0, 1, 1]], [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert two_way_mask(2, torch.arange(3), 1, 2).long().tolist() == [[near], [sides]]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"block": {"attention": {"kind": "stick_breaking", "heads": 4}}}, "StickBreaking.*stages.0.layers.0"),
        ({"stages": [{"mixture_of_depths": {"layers": 2}}]}, "mixture of depths"),
        ({"positions": "none"}, "without positions"),
    ],
)
def test_models_that_look_back_alone_are_refused(shape: dict[str, Any], why: str) -> None:
    with pytest.raises(BraidError, match=f"cannot read rows both ways: .*{why}"):
        check_two_way(tiny_model(**shape).model, "here")
    check_two_way(tiny_model().model, "here")
