"""A kernel opts in: every part with every option is refused, and runs its plain forward, or equals it.

Losses and gradients of tiny models, lowered against plain, in float32; on the CPU in Triton's interpreter.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.part_variants import every_option
from tests.plain_losses import plain_losses

pytest.importorskip("triton", reason="Triton is not installed")

from braidlm.kernels.lowered_model import LoweredModel
from braidlm.kernels.lowered_parts import Lowered
from braidlm.kernels.lowerings.lowering import LOWERINGS
from braidlm.model.dropout import scale_dropout
from braidlm.model.errors import BraidError
from braidlm.model.feed.feeds import SwiGLU
from braidlm.model.gates import VectorGate
from braidlm.model.initialisation import initialisations
from braidlm.model.modeling_braid import BraidForCausalLM
from tests.tiny_models import random_ids, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEFT_OUT = [("initialisation", kind) for kind in initialisations] + [("compression", "int8"), ("compression", "int4")]
"""An initialisation is no part of a forward pass, and quantised matrices have none in training."""
VARIANTS = {" ".join(filter(None, v[:3])): v for v in every_option() if v[:2] not in LEFT_OUT}
ROUTED = [name for name in VARIANTS if "softmax experts" in name or "routed" in name or name.startswith("stage")]
MODELS = [(name, False) for name, variant in VARIANTS.items() if name not in ROUTED or not variant[2]]
MODELS += [(name, True) for name in ROUTED]
"""Variants, and whether routed attention gets positions and heads for which it has kernels; defaults without too."""
TOLERANCE = 2e-5
"""Of a relative error of a gradient in float32."""


def built(name: str, for_routed: bool = False) -> BraidForCausalLM:
    """A model with the variant; `for_routed`, with positions and heads for which routed attention has kernels."""
    noun, kind, option, candidates = VARIANTS[name]
    problems = []
    for architecture in candidates():
        if for_routed:
            block = architecture.get("block", {})
            block = block | {"attention": block.get("attention", {}) | {"heads": 1}}
            architecture = {"positions": "learned", **architecture, "block": block}
        try:
            return tiny_model(**{"stages": ["block"], **architecture})
        except BraidError as error:
            problems.append(str(error))
    raise AssertionError(f"no value of '{option}' of {noun} '{kind}' can be built; say one in VALUES: {problems}")


def outcome(model: BraidForCausalLM, losses: Any) -> dict[str, torch.Tensor]:
    """Losses and every gradient; random choices are the same in every call."""
    ids = random_ids(2, 6).to(DEVICE)
    labels = ids[:, 1:].clone()
    labels[1, 3:] = -100
    model.zero_grad()
    torch.manual_seed(0)
    text, added, _ = losses(ids[:, :-1], labels, 9.0)
    (text if added is None else text + 10 * added).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"text": text.detach()} | ({} if added is None else {"added": added.detach()})


def assert_lowered_equals_plain(model: BraidForCausalLM) -> LoweredModel:
    model = model.to(DEVICE).train()
    scale_dropout(model, 0.0)  # kernels draw other random numbers than torch
    lowered = LoweredModel(model)
    ours = outcome(model, lowered.losses)
    theirs = outcome(model, lambda *batch: plain_losses(model, *batch))
    assert ours.keys() == theirs.keys()
    whole = torch.stack([wanted.norm() for wanted in theirs.values()]).norm()
    for name, wanted in theirs.items():
        error = (ours[name] - wanted).norm() / wanted.norm().clamp_min(1e-2 * whole)  # some cancel to almost nothing
        assert error <= TOLERANCE, f"{name}: relative error {error:.1e}; {lowered.lowered.summary()}"
    return lowered


@pytest.mark.parametrize(("name", "for_routed"), MODELS, ids=[f"{n}{', routed' * r}" for n, r in MODELS])
def test_every_option_is_refused_or_equal(name: str, for_routed: bool) -> None:
    assert_lowered_equals_plain(built(name, for_routed))


def test_the_kernels_are_used() -> None:
    """The test above would pass if everything were refused."""
    models = [built(*variant) for variant in MODELS]
    parts = {part for model in models for part in Lowered(model).parts}
    positions = {model.model.positions for model in models if model.model.embedding in parts}
    assert set(LOWERINGS) <= {type(module) for part in parts | positions for module in part.modules()}


@pytest.mark.parametrize("experts", [None, 3])
def test_biases_of_queries_keys_and_values_alone(experts: int | None) -> None:
    attention = {"heads": 1, "bias": True, "out_bias": False, "experts": experts}
    model = tiny_model(positions="learned", block={"attention": attention})
    assert not assert_lowered_equals_plain(model).lowered.refusals


@dataclass
class Sharpened(SwiGLU.Config):
    """SwiGLU with one more option."""

    sharpness: float = 1.0


def test_an_option_that_is_added_to_a_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwiGLU, "Config", Sharpened)
    usual, changed = ({"kind": "swiglu", "hidden": 24, "sharpness": sharpness} for sharpness in (1.0, 2.0))
    assert not Lowered(tiny_model(block={"feed": usual})).refusals
    lowered = Lowered(tiny_model(stages=["block", {"block": {"feed": changed}}]))
    assert lowered.refusals == {"stages.1.layers.0.feed": "its kernels do not know the option sharpness"}
    plain = "plain: stages.1.layers.0.feed (its kernels do not know the option sharpness)"
    assert lowered.summary() == f"kernels serve 1 of 2 layers whole; {plain}"


class OtherLinear(nn.Linear):
    """As an adapter would put in the place of a linear layer."""


def test_other_classes_and_hooks_are_refused() -> None:
    model = tiny_model(stages=[{"block": {"layers": 4}}])
    first, second, third, _ = model.model.stages[0].layers
    first.attention.qkv.__class__ = OtherLinear
    second.feed.register_forward_hook(lambda *_: None)
    third.drop = nn.Dropout(0.0)
    model.model.norm.__class__ = type("OtherNorm", (type(model.model.norm),), {})
    lowered = assert_lowered_equals_plain(model).lowered
    assert lowered.refusals == {
        "stages.0.layers.0.attention": "qkv is a OtherLinear, which has no kernels",
        "stages.0.layers.1.feed": "it has a forward hook",
        "stages.0.layers.2": "drop is a Dropout",
        "norm": "OtherNorm has no kernels",
    }


class OtherGate(VectorGate):
    """A gate of another kind."""


def test_layers_are_refused_for_gates_that_have_no_kernels() -> None:
    model = tiny_model(stages=[{"block": {"layers": 4}}], gates={"layers": [1, 2, 3]})
    first, second, third, _ = model.model.stages[0].layers
    second.gate.__class__ = OtherGate
    third.gate.register_forward_hook(lambda *_: None)
    lowered = assert_lowered_equals_plain(model).lowered
    assert lowered.refusals == {
        "stages.0.layers.1": "gate: OtherGate has no kernels",
        "stages.0.layers.2": "gate: it has a forward hook",
    }
    first.gate.is_off = True
    assert_lowered_equals_plain(model)


def test_a_layer_that_is_refused_costs_no_other_layer_its_kernels() -> None:
    last = {"block": {"feed": {"learned_beta": True}}}
    model = tiny_model(stages=["block", {"project": {"to": 16}}, {"parallel": {"paths": 2}}, last])
    lowered = assert_lowered_equals_plain(model).lowered
    assert set(lowered.refusals) == {"stages.1", "stages.2.layers.0", "stages.3.layers.0.feed"}
    assert model.model.stages[3].layers[0].attention in lowered.parts


def test_the_summary_counts_layers_by_their_whole_address() -> None:
    model = tiny_model(stages=[{"block": {"layers": 11}}])
    model.model.stages[0].layers[10].feed.register_forward_hook(lambda *_: None)
    assert Lowered(model).summary().startswith("kernels serve 10 of 11 layers whole; plain: stages.0.layers.10.feed (")
