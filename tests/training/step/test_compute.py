"""Sparse or dense: a forward pass never measures; training measures once, before its first step."""

from typing import Any

import pytest
import torch
from torch import nn

from braidlm.model.routing.dispatch import MIN_SPARSE_TOKENS, is_sparse
from braidlm.training.step import compute
from braidlm.training.step.compute import choose_compute, use_compute
from braidlm.training.step.parallel import Rank
from tests.model.routed_models import assert_all_close, outcome, routed_model
from tests.tiny_models import tiny_model

HERE = Rank(0, 1, torch.device("cpu"))
EXPERTS = {"experts": {"names": 3, "router": {"top_k": 2}}}
MODEL: dict[str, Any] = {
    "stages": [
        {"project": {"to": 16, **EXPERTS}},
        {"block": {"layers": 2, "attention": {"heads": 4, **EXPERTS}, "feed": {"hidden": 8, **EXPERTS}}},
        {"parallel": {"paths": 3, "join": {"kind": "routed"}}},
        {"parallel": {"paths": 3, "join": {"kind": "routed", "compute": "dense"}}},
        {"parallel": {"paths": 2}},
    ]
}
MEASURED = {
    "model.stages.0.experts",
    "model.stages.1.layers.0.attention",
    "model.stages.1.layers.0.feed",
    "model.stages.1.layers.1.attention",
    "model.stages.1.layers.1.feed",
    "model.stages.2.layers.0",
}


def choose(model: Any, lowered: set[nn.Module] | None = None) -> dict[str, str]:
    return choose_compute(model, lowered or set(), (2, 8), HERE, torch.float32)


def test_a_choice_can_be_forced() -> None:
    for tokens in (1, 1000):
        assert is_sparse("sparse", torch.zeros(tokens, 4))
        assert not is_sparse("dense", torch.zeros(tokens, 4))


def test_without_a_measurement_the_number_of_tokens_decides() -> None:
    assert is_sparse("measured", torch.zeros(2, MIN_SPARSE_TOKENS // 2, 4))
    assert not is_sparse("measured", torch.zeros(1, MIN_SPARSE_TOKENS - 1, 4))


def test_every_part_that_leaves_it_open_is_measured_and_no_other() -> None:
    model = tiny_model(**MODEL).train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    choices = choose(model)
    assert set(choices) == MEASURED
    assert set(choices.values()) <= {"sparse", "dense"}
    assert torch.equal(torch.get_rng_state(), state), "the run's random numbers are as they were"
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(model.get_submodule(name).compute == "measured" for name in choices)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_kernels_serve_is_not_measured() -> None:
    model = tiny_model(**MODEL).train()
    lowered = {model.model.stages[1].layers[0].feed, model.model.stages[0].experts}
    assert set(choose(model, lowered)) == MEASURED - {"model.stages.1.layers.0.feed", "model.stages.0.experts"}


@pytest.mark.parametrize(("dense", "choice"), [(0.5, "dense"), (0.95, "sparse"), (2.0, "sparse")])
def test_dense_must_be_clearly_faster(monkeypatch: pytest.MonkeyPatch, dense: float, choice: str) -> None:
    measured = []

    def seconds(part: Any, *_: Any) -> float:
        measured.append(part)
        return dense if part.compute == "dense" else 1.0

    monkeypatch.setattr(compute, "_time", seconds)
    choices = choose(tiny_model(**MODEL).train())
    assert set(choices.values()) == {choice}
    assert len(set(measured)) == 4, "parts of one shape are measured once"


def test_a_choice_is_used_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(**MODEL)
    use_compute(model, {"model.stages.0.experts": "dense", "model.stages.2.layers.0": "sparse"})
    assert model.model.stages[0].experts.compute == "dense"
    assert model.model.stages[2].layers[0].compute == "sparse"
    assert "Routed parts: 1 computed dense, 1 computed sparse, the faster here." in capsys.readouterr().out
    use_compute(model, {})
    assert not capsys.readouterr().out


def test_both_computations_give_the_same() -> None:
    found = [outcome(routed_model({"compute": choice}), None) for choice in ("sparse", "dense", "measured")]
    for other in found[1:]:
        assert_all_close(found[0], other)


def test_a_model_without_routed_parts_has_nothing_to_choose() -> None:
    assert choose(tiny_model()) == {}
