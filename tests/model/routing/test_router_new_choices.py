"""Choices that were inserted into a trained router: closed, opening, open."""

import copy
from typing import Any

import pytest
import torch

from braidlm.core.errors import BraidError
from braidlm.model.routing.losses import routing_losses
from braidlm.model.routing.router import RouterConfig, TopKRouter
from tests.tiny_models import randomised

OLD, NEW = ["a", "b", "c"], ["d", "e"]
HIDDEN = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
VARIANTS: list[dict[str, Any]] = [
    {},
    {"renormalise": False, "silent": 2},
    {"balance_rate": 0.1},
    {"sampled": 1, "noise": 0.5},
    {"hidden": 4, "bias": False},
]


def router_pair(**options: Any) -> tuple[TopKRouter, TopKRouter]:
    """A router, and one with new choices whose other rows are the same."""
    plain = randomised(TopKRouter(RouterConfig(**options), 8, OLD))
    grown = randomised(TopKRouter(RouterConfig(**options, new=NEW), 8, [*OLD, *NEW]), seed=1)
    with torch.no_grad():
        for name, parameter in grown.named_parameters():
            own = plain.get_parameter(name)
            if not name.startswith("scores."):
                parameter.copy_(own)
            else:
                parameter[: len(OLD)], parameter[len(OLD) + len(NEW) :] = own[: len(OLD)], own[len(OLD) :]
    return plain.eval(), grown.eval()


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_closed_choices_change_nothing(options: dict[str, Any], training: bool) -> None:
    plain, grown = (router.train(training) for router in router_pair(**options))
    if grown.balance is not None:  # the ranking would prefer them
        grown.balance[len(OLD) :] = 5.0
    before, after = plain(HIDDEN), grown(HIDDEN)
    torch.testing.assert_close(after.probabilities_BTN[..., : len(OLD)], before.probabilities_BTN)
    assert after.probabilities_BTN[..., len(OLD) :].eq(0).all()
    assert after.chosen_BTK.lt(len(OLD)).all()
    if not training:
        torch.testing.assert_close(after.weights_BTN[..., : len(OLD)], before.weights_BTN)


@pytest.mark.parametrize("opening", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("name", routing_losses)
def test_losses_and_gradients_are_finite(opening: float, name: str) -> None:
    _, router = router_pair(losses={})
    router.open(opening)
    routing = router(HIDDEN)
    loss = routing_losses[name](routing, torch.ones(2, 5)) + routing.weights_BTK.square().sum()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in router.parameters() if p.grad is not None)


def test_the_opening_is_a_factor_on_the_probability() -> None:
    _, router = router_pair()
    router.open(1.0)
    whole = router.score(HIDDEN).softmax(-1)
    torch.testing.assert_close(router(HIDDEN).probabilities_BTN, whole)
    router.opening.fill_(0.25)
    part = torch.cat((whole[..., : len(OLD)], 0.25 * whole[..., len(OLD) :]), dim=-1)
    torch.testing.assert_close(router(HIDDEN).probabilities_BTN, part / part.sum(-1, keepdim=True))


def test_it_opens_and_never_closes() -> None:
    _, router = router_pair()
    for share, expected in ((0.25, 0.25), (0.125, 0.25), (1.0, 1.0), (0.5, 1.0)):
        router.open(share)
        assert router.opening.tolist() == [expected] * 2
    plain, _ = router_pair()
    plain.open(0.5)  # one without new choices has nothing to open
    assert copy.deepcopy(router).opening.tolist() == [1.0, 1.0]
    assert router.state_dict()["opening"].tolist() == [1.0, 1.0]


def test_half_precision_scores_in_float32() -> None:
    _, router = router_pair()
    router.open(0.5)
    routing = router.to(torch.bfloat16)(HIDDEN.to(torch.bfloat16))
    assert routing.probabilities_BTN.dtype is torch.float32
    assert routing.probabilities_BTN.isfinite().all()


def test_an_inactive_choice_stays_off_beside_closed_ones() -> None:
    _, router = router_pair(balance_rate=0.1, top_k=1)
    router.inactive = frozenset({"a"})
    chosen = router(HIDDEN).chosen_BTK
    assert chosen.ge(1).all()
    assert chosen.lt(3).all()


@pytest.mark.parametrize("new", [["a"], ["e", "d"], ["f"], ["e", "e"], ["x", *OLD, *NEW]], ids=str)
def test_new_choices_are_the_last(new: list[str]) -> None:
    with pytest.raises(BraidError, match="these must be the last of the choices: a, b, c, d, e"):
        TopKRouter(RouterConfig(new=new), 8, [*OLD, *NEW])
