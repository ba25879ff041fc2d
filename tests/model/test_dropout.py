"""Dropout by kind: each acts alone, where it says, and whole experts are left out without changing a token's weight."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from braidlm.kernels.lowered_parts import Lowered
from braidlm.model.dropout import BlockDropout, Dropout, leave_out, scale_dropout
from braidlm.model.errors import BraidError
from braidlm.model.feed.feeds import feeds
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.routing import Routings
from tests.tiny_models import random_ids, tiny_model

EXPERTS = {"names": 3, "router": {"top_k": 2}}
BANKS: dict[str, dict[str, Any]] = {
    "own": {"attention": {"heads": 4, "experts": EXPERTS}, "feed": {"kind": "mlp", "experts": EXPERTS}},
    "shared": {"attention": {"heads": 4, "experts": {**EXPERTS, "keys": "shared"}}, "feed": {"kind": "geglu"}},
}
ROUTED = [
    {"project": {"to": 16, "experts": EXPERTS}},
    {"parallel": {"paths": 3, "join": {"kind": "routed", "top_k": 2}}},
]
KINDS: dict[str, dict[str, Any]] = {
    "feed": {"block": {"feed": {"kind": "mlp"}}},
    "feed of swiglu": {"block": {"feed": {"kind": "swiglu", "learned_beta": True}}},
    "feed of geglu": {"block": {"feed": {"kind": "geglu"}}},
    "feed of experts": {"block": BANKS["own"]},
    "expert_outputs": {"block": BANKS["own"]},
    "expert_outputs of shared keys": {"block": BANKS["shared"]},
    "experts": {"block": BANKS["own"]},
    "experts of shared keys": {"block": BANKS["shared"]},
    "experts of projections and paths": {"stages": ROUTED},
}


def rates(model: BraidForCausalLM, kind: str) -> set[float]:
    return {m.rate for m in model.modules() if isinstance(m, Dropout) and m.kind == kind}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("compute", ["sparse", "dense"])
def test_each_kind_acts_in_training_alone_and_can_be_scaled_away(name: str, compute: str) -> None:
    model, ids = tiny_model(**KINDS[name], dropout={name.split()[0]: 0.5}), random_ids(2, 8)
    for part in model.modules():
        if hasattr(part, "compute"):
            part.compute = compute
    expected = model(ids, use_cache=False).logits
    model.train()
    assert not torch.allclose(model(ids).logits, expected, atol=1e-3)
    scale_dropout(model, 0.0)
    torch.testing.assert_close(model(ids).logits, expected)


def test_one_rate_is_that_of_the_former_kinds() -> None:
    model = tiny_model(block=BANKS["own"], dropout=0.1)
    assert [rates(model, kind) for kind in ("feed", "expert_outputs", "experts")] == [{0.0}] * 3
    assert rates(model, "") == {0.1}


def test_a_block_may_have_its_own_rate() -> None:
    blocks = [{"block": {**BANKS["own"], "dropout": {"experts": 0.4}}}, {"block": BANKS["own"]}]
    model = tiny_model(stages=[*blocks, *ROUTED], dropout={"experts": 0.2})
    of_stages = [rates(stage, "experts") for stage in model.model.stages]
    assert of_stages == [{0.4}, {0.2}, {0.2}, {0.2}]


class Twice(nn.Module):
    """A feed-forward of another package, which knows nothing of dropout."""

    @dataclass
    class Config:
        pass

    def __init__(self, config: Config, width: int):
        super().__init__()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routings]:
        return 2 * hidden, ()


def test_a_feed_forward_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(feeds.parts, "twice", Twice)
    assert tiny_model(block={"feed": "twice"}, dropout=0.1)
    with pytest.raises(BraidError, match="feed-forward 'twice' has no dropout of inner activations"):
        tiny_model(block={"feed": "twice"}, dropout={"feed": 0.1})


WEIGHTS = st.lists(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=20)


@given(WEIGHTS, st.floats(0, 0.99), st.integers(0, 99))
def test_a_token_keeps_its_weight_and_at_least_one_expert(rows: list[list[float]], rate: float, seed: int) -> None:
    weights = torch.tensor([rows], dtype=torch.float64, requires_grad=True)
    torch.manual_seed(seed)
    kept = leave_out(weights, rate)
    torch.testing.assert_close(kept.sum(-1), weights.sum(-1))
    assert torch.equal((kept > 0).any(-1), (weights > 0).any(-1))
    assert torch.equal(kept[weights == 0], weights[weights == 0])
    (gradient,) = torch.autograd.grad(kept.square().sum(), weights)
    assert gradient.isfinite().all()


def test_experts_are_left_out_at_their_rate_and_the_others_take_over() -> None:
    weights = torch.tensor([0.6, 0.4]).expand(1, 100_000, 2)
    torch.manual_seed(0)
    kept = leave_out(weights, 0.1)
    pairs, counts = kept[0].unique(dim=0, return_counts=True)
    assert pairs.tolist() == [[0.0, 1.0], [pytest.approx(0.6), pytest.approx(0.4)], [1.0, 0.0]]
    assert (counts / 100_000).tolist() == [pytest.approx(share, abs=0.005) for share in (0.09, 0.82, 0.09)]


def test_the_record_has_the_weights_that_were_used_and_all_choices() -> None:
    model = tiny_model(block=BANKS["own"], dropout={"experts": 0.5}).train()
    routings = model(random_ids(2, 16)).routings
    assert all((routing.weights_BTK == 0).any() for routing in routings)
    assert all(routing.chosen_BTK.shape[-1] == 2 for routing in routings)
    for routing in routings:
        torch.testing.assert_close(routing.weights_BTK.sum(-1), torch.ones(2, 16))


@pytest.mark.parametrize("stage", ["block", "mixture_of_depths"])
def test_kernels_know_every_kind_of_dropout(stage: str) -> None:
    for kind in vars(BlockDropout()):
        model = tiny_model(block={"feed": {"experts": 2}}, stages=[stage], dropout={kind: 0.1})
        assert not Lowered(model).refusals
        assert any(drop.rate for drop in model.modules() if isinstance(drop, Dropout))
