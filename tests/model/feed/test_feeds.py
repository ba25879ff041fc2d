"""Feed-forward parts and norms against their formulas, forward and gradients, in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.model.config.registry import Registry
from braidlm.model.config.strict import decode
from braidlm.model.feed.feeds import feeds, gated_hidden
from braidlm.model.norms import norms
from tests.tiny_models import randomised

WIDTH = 10


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rms(part: Any, x: Tensor, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * part.weight


def affine(layer: nn.Linear, x: Tensor) -> Tensor:
    product = torch.einsum("...i,oi->...o", x, layer.weight)
    return product if layer.bias is None else product + layer.bias


def mlp(activation: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda part, x: affine(part.out, activation(affine(part.up, x)))


def gated(activation: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def formula(part: Any, x: Tensor) -> Tensor:
        both = affine(part.gate_up, x)
        hidden = both.shape[-1] // 2
        return affine(part.out, activation(part, both[..., :hidden]) * both[..., hidden:])

    return formula


FORMULAS: dict[str, tuple[Registry, str, dict[str, Any], Callable[[Any, Tensor], Tensor]]] = {
    "gelu": (feeds, "mlp", {"activation": "gelu"}, mlp(gelu)),
    "gelu_new": (feeds, "mlp", {"activation": "gelu_new", "bias": True}, mlp(gelu_new)),
    "relu": (feeds, "mlp", {"activation": "relu", "hidden": 7}, mlp(lambda x: x * (x > 0))),
    "swiglu": (feeds, "swiglu", {"bias": True}, gated(lambda part, x: x / (1 + torch.exp(-x)))),
    "swiglu with beta": (
        feeds,
        "swiglu",
        {"learned_beta": True, "hidden": 7},
        gated(lambda part, x: x / (1 + torch.exp(-part.beta * x))),
    ),
    "geglu": (feeds, "geglu", {"bias": True, "hidden": 7}, gated(lambda part, x: gelu(x))),
    "layer": (
        norms,
        "layer",
        {"eps": 1e-3},
        lambda part, x: (
            (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-3).sqrt() * part.weight
            + part.bias
        ),
    ),
    "layer without bias": (
        norms,
        "layer",
        {"bias": False},
        lambda part, x: (
            (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * part.weight
        ),
    ),
    "rms": (
        norms,
        "rms",
        {"eps": 1e-3},
        lambda part, x: rms(part, x, 1e-3),
    ),
    "per path": (
        norms,
        "per_path",
        {"paths": [{"name": "a", "width": 4}, {"name": "b", "width": 6}]},
        lambda part, x: torch.cat((rms(part.paths.a, x[..., :4], 1e-5), rms(part.paths.b, x[..., 4:], 1e-5)), -1),
    ),
}


def test_every_part_has_its_formula_here() -> None:
    tested = {(registry.noun, kind) for registry, kind, _, _ in FORMULAS.values()}
    assert tested == {(registry.noun, kind) for registry in (feeds, norms) for kind in registry}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_part_is_its_formula(name: str) -> None:
    registry, kind, options, formula = FORMULAS[name]
    cls = registry[kind]
    part = randomised(cls(decode(cls.Config, options), WIDTH)).double()
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 4, WIDTH, dtype=torch.float64)
    output = part(x)
    output = output[0] if registry is feeds else output
    results = []
    for result in (output, formula(part, x)):
        gradients = torch.autograd.grad((result * weights).sum(), [x, *part.parameters()])
        results.append([result.detach(), *gradients])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("width", [1, 24, 128, 192, 256, 512])
def test_a_gated_part_costs_about_what_the_plain_one_does(width: int) -> None:
    hidden = gated_hidden(width)
    assert hidden % 64 == 0
    assert 8 * width / 3 - 1 < hidden < 8 * width / 3 + 64


def test_default_sizes() -> None:
    assert feeds["mlp"](feeds["mlp"].Config(), 12).up.out_features == 48
    assert feeds["swiglu"](feeds["swiglu"].Config(), 48).gate_up.out_features == 2 * 128


@pytest.mark.parametrize("kind", list(feeds))
@pytest.mark.parametrize("hidden", [0, -3])
def test_an_inner_size_below_one_is_refused(kind: str, hidden: int) -> None:
    with pytest.raises(BraidError, match=f"hidden: expected a whole number from 1 to 100000, got {hidden}"):
        decode(feeds[kind].Config, {"hidden": hidden})
