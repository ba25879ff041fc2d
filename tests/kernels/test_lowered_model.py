"""Whole models by kernels against their plain forward: stream, routings, losses and the gradient of every parameter."""

from typing import Any

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels import lowered_parts
from braidlm.kernels.lowered_model import LoweredModel
from braidlm.kernels.ops.dropout import DropoutUse
from braidlm.kernels.ops.tuned_products import _products
from braidlm.kernels.side_stream import SideStream
from braidlm.model import stages
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.switches import freeze
from braidlm.training.step.objective import routers
from tests.kernels.comparison import (
    TOLERANCES,
    InlineSideStream,
    assert_close,
    dropout_factors,
    relative_error,
    side_stream,
)
from tests.kernels.whole_models import plain_stream, results
from tests.tiny_models import random_ids, randomised, tiny_config, tiny_model

DENSE: dict[str, dict[str, Any]] = {
    "gpt2": {
        "positions": "learned",
        "block": {
            "norm": "layer",
            "attention": {"heads": 4, "bias": True},
            "feed": {"kind": "mlp", "activation": "gelu_new", "bias": True},
        },
    },
    "llama": {"positions": "rope", "block": {"attention": {"heads": 4, "kv_heads": 2}}},
    "a refused block": {
        "block": {"norm": "layer", "attention": {"heads": 4, "bias": True}, "feed": {"kind": "mlp", "bias": True}}
    },
    "papaformer": {
        "positions": {"kind": "rope", "pairs": "interleaved"},
        "block": {"attention": {"heads": 4, "out_projection": False, "window": 5}, "feed": {"kind": "geglu"}},
    },
    "shared feeds": {"stages": [{"block": {"layers": 3, "share": "feeds"}}], "block": {"attention": {"heads": 4}}},
    "shared attentions": {
        "positions": "learned",
        "stages": [{"block": {"layers": 4, "share": {"kind": "attentions", "layers": "interior"}}}],
        "block": {"norm": "layer", "attention": {"heads": 4, "bias": True}},
    },
    "shared blocks": {
        "positions": "learned",
        "stages": [{"block": {"layers": 3, "share": "blocks"}}, "block"],
        "block": {"norm": "layer", "attention": {"heads": 1, "bias": True}, "feed": {"kind": "mlp", "bias": True}},
    },
}

DENSE["gates"] = DENSE["gpt2"] | {"gates": {"kind": "vector", "layers": [1, 2]}}
DENSE["gates of a narrow matrix"] = DENSE["llama"] | {"gates": {"kind": {"kind": "matrix", "rank": 3, "bias": True}}}

BLOCK = {
    "norm": "layer",
    "attention": {"heads": 1, "bias": True},
    "feed": {"kind": "mlp", "activation": "gelu_new", "hidden": 24, "bias": True},
}
EXPERTS = {"experts": {"names": 3, "router": {"top_k": 2, "compute": "sparse"}}}
TWO_LAYERS = {"top_k": 2, "renormalise": False, "bias": False, "compute": "sparse"}
ROUTED: dict[str, dict[str, Any]] = {
    "moep": {
        "positions": "learned",
        "width": 32,
        "block": BLOCK | {"attention": {"heads": 2, "bias": True}},
        "stages": [
            "block",
            {"project": {"to": 16, "bias": True, **EXPERTS}},
            {
                "parallel": {
                    "layers": 2,
                    "paths": 3,
                    "attention": {"heads": 1},
                    "join": {"kind": "routed", "compute": "sparse"},
                }
            },
            {"project": {"to": 32, **EXPERTS}},
            "block",
        ],
    },
    "gated": {
        "positions": "none",
        "block": {"norm": "rms", "attention": {"heads": 1}, "feed": {"kind": "swiglu", "hidden": 24}},
        "stages": [
            {"project": {"to": 16, "experts": {"names": 3, "kind": "swiglu", "router": {"compute": "sparse"}}}},
            {
                "parallel": {
                    "paths": 3,
                    "join": {"kind": "routed", "top_k": 1, "renormalise": False, "compute": "sparse"},
                }
            },
        ],
    },
    "sublayers": {
        "positions": "learned",
        "block": BLOCK,
        "stages": [
            {
                "parallel": {
                    "layers": 2,
                    "paths": 3,
                    "attention": {"head_dim": 16, "window": 5},
                    "join": {"kind": "routed", "per": "sublayer", "balance_rate": 0.1, "compute": "sparse"},
                }
            },
            {"block": {"feed": {"experts": {"names": 4, "shared": 20, "router": {"top_k": 3, "compute": "sparse"}}}}},
        ],
    },
    "more choices than a norm's kernel holds": {
        "positions": "learned",
        "block": BLOCK | {"feed": {"hidden": 8, "experts": {"names": 9, "router": {"top_k": 3, "compute": "sparse"}}}},
    },
    "more paths than a norm's kernel holds": {
        "positions": "learned",
        "block": BLOCK,
        "stages": [
            {"project": {"to": 16, "experts": {"names": 5, "router": {"compute": "sparse"}}}},
            {"parallel": {"layers": 2, "paths": 5, "join": {"kind": "routed", "compute": "sparse"}}},
        ],
    },
    "paths, then as many experts": {
        "positions": "learned",
        "block": BLOCK,
        "stages": [
            {"parallel": {"paths": 3, "join": {"kind": "routed", "compute": "sparse"}}},
            {"block": {"feed": {"experts": {"names": 3, "router": {"compute": "sparse"}}}}},
        ],
    },
    "experts in every other layer": {
        "positions": "rope",
        "block": {"attention": {"heads": 2}, "feed": {"kind": "mlp", "hidden": 24}},
        "stages": 2
        * [
            "block",
            {"block": {"feed": {"experts": {"names": 6, "shared": 12, "router": {"top_k": 2, "compute": "sparse"}}}}},
        ],
    },
    "modules": {
        "positions": "none",
        "block": {
            "norm": "layer",
            "attention": {
                "kind": "stick_breaking",
                "heads": 2,
                "experts": {"names": 4, "keys": "shared", "kv_bias": True, "router": {"hidden": 8, **TWO_LAYERS}},
            },
            "feed": {"kind": "mlp", "hidden": 24, "experts": {"names": 5, "router": {"hidden": 8, **TWO_LAYERS}}},
        },
    },
    "modules that read the stream as keys, and one bank without": {
        "positions": "none",
        "block": {
            "attention": {
                "kind": "stick_breaking",
                "heads": 2,
                "kv_heads": 1,
                "head_dim": 16,
                "rest": "current",
                "experts": {"names": 3, "keys": "stream", "router": {"compute": "sparse"}},
            }
        },
        "stages": ["block", {"block": {"attention": {"current": False, "bias": True, "experts": None}}}],
    },
    "softmax modules": {
        "positions": "learned",
        "block": BLOCK
        | {
            "attention": {
                "heads": 2,
                "bias": True,
                "experts": {"names": 3, "keys": "shared", "router": {"hidden": 8, **TWO_LAYERS}},
            }
        },
    },
    "paths with shared blocks": {
        "positions": "learned",
        "block": BLOCK,
        "stages": [
            {"parallel": {"layers": 2, "paths": 3, "share": "blocks", "join": {"kind": "routed", "compute": "sparse"}}}
        ],
    },
    "shared banks": {
        "positions": "learned",
        "block": BLOCK | {"attention": {"heads": 1, "bias": True, **EXPERTS}, "feed": {"hidden": 24, **EXPERTS}},
        "stages": [{"block": {"layers": 2, "share": "blocks"}}],
    },
    "depths": {
        "positions": "rope",
        "block": {"attention": {"heads": 1}},
        "stages": [{"mixture_of_depths": {"layers": 4}}],
    },
    "depths alone, with biases": {
        "positions": "learned",
        "block": BLOCK,
        "stages": [{"mixture_of_depths": {"layers": 2, "every": 1, "capacity": 0.3}}, {"mixture_of_depths": {}}],
    },
    "depths of experts": {
        "positions": "learned",
        "block": BLOCK | {"attention": {"heads": 1, "bias": True, **EXPERTS}, "feed": {"hidden": 24, **EXPERTS}},
        "stages": [{"mixture_of_depths": {"layers": 2, "capacity": 0.4}}, "block"],
    },
    "experts beside a shared part": {
        "positions": "learned",
        "block": BLOCK | {"feed": BLOCK["feed"] | {"experts": EXPERTS["experts"] | {"shared": 20}}},
        "stages": [{"block": {"layers": 3}}],
    },
    "a shared part, and more choices than a norm's kernel holds": {
        "positions": "rope",
        "block": {
            "attention": {"heads": 4},
            "feed": {"hidden": 8, "experts": {"names": 9, "shared": 12, "router": {"top_k": 3, "compute": "sparse"}}},
        },
    },
    "a shared part and routers of two layers": {
        "positions": "none",
        "block": BLOCK
        | {"feed": BLOCK["feed"] | {"experts": {"names": 4, "shared": 20, "router": {"hidden": 8, **TWO_LAYERS}}}},
    },
    "depths of experts beside a shared part": {
        "positions": "learned",
        "block": BLOCK | {"feed": BLOCK["feed"] | {"experts": EXPERTS["experts"] | {"shared": 20}}},
        "stages": [{"mixture_of_depths": {"layers": 4, "capacity": 0.4}}],
    },
    "rotary beside experts": {
        "positions": "rope",
        "block": {
            "attention": {"heads": 2, "bias": True},
            "feed": {"hidden": 8, "experts": {"names": 4, "router": {"compute": "sparse"}}},
        },
    },
}
ROUTED["gates around paths and experts"] = ROUTED["paths, then as many experts"] | {
    "stages": [
        {"parallel": {"layers": 3, "paths": 3, "join": {"kind": "routed", "compute": "sparse"}}},
        {"block": {"layers": 2, "feed": {"experts": {"names": 4, "shared": 20, "router": {"compute": "sparse"}}}}},
    ],
    "gates": {"kind": "scalar", "layers": [1, 3, 4, 5]},
}
ROUTED["gates around depths"] = ROUTED["depths alone, with biases"] | {"gates": {"kind": "matrix"}}


class Halved(torch.nn.Module):
    """A dropout with a known outcome."""

    probability = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


SIDES = [(name, True) for name in DENSE | ROUTED] + [(name, False) for name in ("gpt2", "moep", "modules")]
"""With a side stream for every model; without one, the same kernels run in another order, which a few show."""


@pytest.mark.parametrize(("name", "on_side"), SIDES, ids=[f"{n}{', side stream' * on}" for n, on in SIDES])
def test_the_stream_equals_the_plain_one(name: str, on_side: bool, device: str, dtype: torch.dtype) -> None:
    """A whole model rounds many times: the error of the plain forward in the same type is the measure."""
    if name in ROUTED and dtype != torch.float32:
        pytest.skip("in a low-precision type tokens may choose other experts")
    model, ids = tiny_model(**(DENSE | ROUTED)[name]).to(device).train(), random_ids(2, 9).to(device)
    if name == "a refused block":
        for stage in model.model.stages:
            stage.layers[0].drop = Halved()
    weights, side = torch.randn(2, 9, model.model.width_out, device=device), side_stream(device) if on_side else None
    lowered = LoweredModel(model, side)
    assert bool(lowered.lowered.refusals) == (name == "a refused block")
    actual = results(model, lowered.stream, ids, weights, dtype, side)
    plain = results(model, lambda ids: plain_stream(model.model, ids), ids, weights, dtype, None)
    model.double()
    exact = results(model, lambda ids: plain_stream(model.model, ids), ids, weights.double(), torch.float64, None)
    assert actual.keys() == plain.keys() == exact.keys()
    for what, expected in exact.items():
        tolerance = 4 * relative_error(plain[what], expected) + 2 * TOLERANCES[dtype]
        assert_close(actual[what], expected, tolerance, what)


class Scaled(torch.nn.Module):
    """A dropout that multiplies by known factors."""

    def __init__(self, factors: Tensor):
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors.view_as(x)


def test_activations_are_dropped_by_the_seed_of_their_part(device: str) -> None:
    model = tiny_model(**DENSE["gpt2"], dropout={"feed": 0.3}).to(device).train()
    ids, weights = random_ids(2, 9).to(device), torch.randn(2, 9, model.model.width_out, device=device)
    lowered, seeds = LoweredModel(model), []

    def stream(ids: Tensor) -> tuple[Any, ...]:
        hidden, routings, context = lowered.stream(ids)
        seeds.append(context.seeds)
        return hidden, routings

    actual = results(model, stream, ids, weights, torch.float32, None)
    assert not lowered.lowered.refusals
    for stage in model.model.stages:
        for block in stage.layers:
            dropout = DropoutUse(0.3, seeds[0][block.feed][0])
            block.feed.drop = Scaled(dropout_factors(dropout, ids.numel(), block.feed.up.out_features))
    plain = results(model, lambda ids: plain_stream(model.model, ids), ids, weights, torch.float32, None)
    for what, expected in plain.items():
        assert_close(actual[what], expected.double(), 4 * TOLERANCES[torch.float32], what)


def assert_dropout_equals_the_plain_one(model: Any, device: str) -> dict[str, Tensor]:
    model, ids, side = model.to(device).train(), random_ids(2, 9).to(device), side_stream(device)
    weights, lowered = torch.randn(2, 9, model.model.width_out, device=device), LoweredModel(model, side)
    assert not lowered.lowered.refusals
    actual = results(model, lowered.stream, ids, weights, torch.float32, side)
    plain = results(model, lambda ids: plain_stream(model.model, ids), ids, weights, torch.float32, None)
    for what, expected in plain.items():
        assert_close(actual[what], expected.double(), 8 * TOLERANCES[torch.float32], what)
    return actual


BESIDE = ["experts beside a shared part", "depths of experts beside a shared part", "modules"]


@pytest.mark.parametrize("name", [*BESIDE, "a shared part, and more choices than a norm's kernel holds", "moep"])
def test_experts_that_are_left_out(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in both passes, whatever else they draw."""
    monkeypatch.setattr(torch, "rand_like", lambda x: (torch.arange(x.numel(), device=x.device) * 0.37 % 1).view_as(x))
    actual = assert_dropout_equals_the_plain_one(tiny_model(**ROUTED[name], dropout={"experts": 0.4}), device)
    shares = [value for what, value in actual.items() if what.endswith(" weights")]
    assert shares
    assert all(((share > 0).sum(-1) == 1).any() for share in shares), "of every two experts, one stayed somewhere"


@pytest.mark.parametrize("name", [*BESIDE, "sublayers", "shared banks"])
def test_dropout_of_what_experts_give(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a known factor: sorted rows are padded, so that they are others than those of the plain forward."""
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, probability: (1 - probability) * x)
    assert_dropout_equals_the_plain_one(tiny_model(**ROUTED[name], dropout={"expert_outputs": 0.4}), device)


RESIDUAL = ["gpt2", "moep", "depths alone, with biases", "experts beside a shared part", "sublayers"]
KINDS = [("feed", name) for name in (*BESIDE, "moep", "gated", "llama", "papaformer")]


@pytest.mark.parametrize(("kind", "name"), KINDS + [("residual", name) for name in RESIDUAL])
def test_dropout_of_values(kind: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a known factor: a threshold of 1 drops next to nothing, and what is kept is scaled."""
    monkeypatch.setattr(DropoutUse, "threshold", property(lambda use: 1 if use.probability else 0))
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, probability: x / (1 - probability))
    architecture = (DENSE | ROUTED)[name]
    actual = assert_dropout_equals_the_plain_one(tiny_model(**architecture, dropout={kind: 0.4}), device)
    with torch.no_grad():
        undropped, _ = plain_stream(tiny_model(**architecture).to(device).train().model, random_ids(2, 9).to(device))
    assert not torch.allclose(actual["stream"], undropped, rtol=1e-2)


def test_gradients_of_a_mixture_of_depths_in_several_stacks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every two layers, one of which has fewer rows, in place of all four."""
    monkeypatch.setattr(lowered_parts, "ROWS", 2 * 18)
    model, ids = tiny_model(**ROUTED["depths"]).to(device).train(), random_ids(2, 9).to(device)
    layers = [layer for _, layer in LoweredModel(model).lowered.layers]
    groups = [(rows, len(some)) for rows, some in lowered_parts.row_groups(layers, set(layers), 2, 9)]
    assert groups == [(18, 2), (8, 1)] * 2
    weights, side = torch.randn(2, 9, model.model.width_out, device=device), side_stream(device)
    actual = results(model, LoweredModel(model, side).stream, ids, weights, torch.float32, side)
    plain = results(model, lambda ids: plain_stream(model.model, ids), ids, weights, torch.float32, None)
    assert actual.keys() == plain.keys()
    for what, expected in plain.items():
        assert_close(actual[what], expected.double(), 4 * TOLERANCES[torch.float32], what)


@pytest.mark.parametrize("frozen", [["blocks"], ["blocks", "routers", "embedding", "head"]], ids=["", "routers too"])
@pytest.mark.parametrize("hidden", [8, None], ids=["routers of two layers", "routers of one"])
def test_inserted_modules_that_train_alone(hidden: int | None, frozen: list[str], device: str) -> None:
    """The rows of modules that were there before have a gradient of zeros, as in the plain forward."""
    experts = {"names": 4, "router": {"new": ["expert_4"], "losses": {"new_rows": 0.5}, **TWO_LAYERS, "hidden": hidden}}
    attention = {"kind": "stick_breaking", "heads": 2, "experts": {**experts, "keys": "shared"}}
    feed = {"kind": "mlp", "hidden": 24, "bias": True, "experts": experts}
    block = {"norm": "layer", "attention": attention, "feed": feed}
    model = tiny_model(positions="none", block=block, stages=["block"])
    model = model.to(device).train()
    for opening in (0.0, 20.0):  # far above 1, so that tokens choose the new module
        for router in routers(model):
            router.open(opening)
        freeze(model, frozen)
        ids, weights = random_ids(2, 9).to(device), torch.randn(2, 9, model.model.width_out, device=device)
        lowered = LoweredModel(model, side_stream(device))
        assert not lowered.lowered.refusals
        actual = results(model, lowered.stream, ids, weights, torch.float32, None)
        plain = results(model, lambda ids: plain_stream(model.model, ids), ids, weights, torch.float32, None)
        assert actual.keys() == plain.keys()
        for what, expected in plain.items():
            assert_close(actual[what], expected.double(), 2 * TOLERANCES[torch.float32], what)
        gradient = model.model.stages[0].layers[0].feed.bank.up.weight.grad
        assert not gradient[:3].any()
        assert bool(gradient[3].any()) == bool(opening)


@pytest.mark.parametrize("name", DENSE | ROUTED)
def test_logits_equal_the_plain_ones(name: str, device: str) -> None:
    """Without a backward pass some kernels keep less."""
    model, ids = tiny_model(**(DENSE | ROUTED)[name]).to(device).eval(), random_ids(2, 9).to(device)
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(LoweredModel(model).logits(ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "architecture",
    [
        DENSE["gpt2"],
        ROUTED["moep"] | {"stages": ROUTED["moep"]["stages"][1:3], "tie_embeddings": False},
        ROUTED["gates around depths"],
        ROUTED["a shared part, and more choices than a norm's kernel holds"],
    ],
    ids=["gpt2", "moep's projection and parallel layers", "depths and gates", "experts beside a shared part"],
)
@pytest.mark.parametrize("dropout", [0.3, {"feed": 0.3, "experts": 0.3, "expert_outputs": 0.3}], ids=["", "of parts"])
def test_a_layer_that_is_computed_again_drops_the_same(
    architecture: dict[str, Any], dropout: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With activation checkpointing, which keeps the random state of the devices of the tensors that it is given."""

    def checkpoint(layer: Any, hidden: Any, *arguments: Any, **options: Any) -> Any:
        assert isinstance(hidden, Tensor)
        return torch.utils.checkpoint.checkpoint(layer, hidden, *arguments, **options)

    monkeypatch.setattr(stages, "checkpoint", checkpoint)
    model = tiny_model(**architecture, dropout=dropout).to(device).train()
    ids, both = random_ids(1, 7).to(device), []
    for again in (False, True):
        (model.gradient_checkpointing_enable if again else model.gradient_checkpointing_disable)()
        torch.manual_seed(3)
        hidden, *_ = LoweredModel(model).stream(ids)
        hidden.square().sum().backward()
        both.append([hidden.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad(set_to_none=True)
    for once, twice in zip(*both, strict=True):
        assert (once is None) == (twice is None)
        if once is not None:
            torch.testing.assert_close(once, twice, rtol=1e-4, atol=1e-5)


def losses(
    model: BraidForCausalLM, lowered: LoweredModel | None, ids: Tensor, labels: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The loss of the text and the gradients of all parameters; without `lowered` by torch."""
    model.zero_grad()
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        if lowered is not None:
            loss, added, _ = lowered.losses(ids, labels)
            assert added is None
        else:
            logits = model.head(plain_stream(model.model, ids)[0]).flatten(0, 1)
            logits = logits.float() if dtype == torch.bfloat16 else logits
            loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    if lowered is not None:
        lowered.synchronize()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_losses_equal_the_plain_ones(layers: int, tied: bool, device: str, dtype: torch.dtype) -> None:
    """A matrix that embedding and head share has one gradient, however many blocks are between them. And nobody holds
    the gradients that autograd gets: it would copy them, on a device before they are complete.
    """
    model = tiny_model(stages=[{"block": {"layers": layers}}], tie_embeddings=tied, **DENSE["gpt2"]).to(device).train()
    ids, side = random_ids(3, 9).to(device), side_stream(device)
    actual = losses(model, LoweredModel(model, side), ids[:, :-1], ids[:, 1:], dtype)
    if isinstance(side, InlineSideStream):
        for name, parameter in model.named_parameters():
            for held in side.held:
                assert held.shape != parameter.shape or not torch.equal(held, parameter.grad), f"{name} is held"
    expected = losses(model, None, ids[:, :-1], ids[:, 1:], dtype)
    assert actual.keys() == expected.keys()
    for what, plain in expected.items():
        assert_close(actual[what], plain.double(), 4 * TOLERANCES[dtype], what)


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_losses_of_a_model_with_tuned_products(positions: str) -> None:
    """Products that are large enough to be tuned, in bf16, with the head."""
    architecture = {"width": 256, "context": 640, "tie_embeddings": positions == "learned"}
    config = tiny_config(4096, **DENSE["gpt2"] | architecture | {"positions": positions})
    model = randomised(BraidForCausalLM(config)).cuda().train()
    ids = random_ids(8, 513, vocab_size=4096).cuda()
    ids[:, :100] = 7  # one token's gradient is a sum of many
    labels = ids[:, 1:].clone()
    labels[3, 50:] = IGNORED
    sides = (None, SideStream(torch.device("cuda")))
    actual = [losses(model, LoweredModel(model, side), ids[:, :-1], labels, torch.bfloat16) for side in sides]
    assert _products, "no product was tuned"
    plain = losses(model, None, ids[:, :-1], labels, torch.bfloat16)
    model.double()
    for what, exact in losses(model, None, ids[:, :-1], labels, torch.float64).items():
        for one in actual:
            assert_close(one[what], exact, 1.5 * relative_error(plain[what], exact) + 1e-3, what)
