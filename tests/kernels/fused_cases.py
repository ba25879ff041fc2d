"""Checks of the fused kernels against torch's own operations in float64: outputs and every gradient.

Run as a script in Triton's interpreter (`TRITON_INTERPRET=1`), or called by tests on a device.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from braidlm.kernels.ops.activation import Activation, plain_activation
from braidlm.kernels.ops.add import AddDelta, plain_add
from braidlm.kernels.ops.cast import cast_all
from braidlm.kernels.ops.column_sums import Sums
from braidlm.kernels.ops.embedding import Embed, plain_embed
from braidlm.kernels.ops.linear import Linear
from braidlm.kernels.ops.norm import AddNorm, plain_add_norm
from braidlm.kernels.ops.norm_router import AddNormRoute, CombineNormRoute, NormRouteConfig, plain_add_norm_route
from braidlm.kernels.ops.router import Route, plain_route
from braidlm.kernels.ops.split_heads import SplitHeads, plain_split_heads
from braidlm.kernels.ops.tuned_products import _products
from braidlm.kernels.planned_pass import fused_stream, has_fused_pass
from braidlm.kernels.routed.choice_means import choice_means
from braidlm.kernels.routed.combine import Combine
from braidlm.kernels.routed.permutation import permute
from braidlm.kernels.routed.rows import AddNormRows, Norm, plain_add_norm_rows
from braidlm.kernels.side_stream import SideStream
from braidlm.model import modeling_braid
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.losses import OF_MEANS, routing_loss, switch
from braidlm.model.routing.routing import Routing, Routings
from tiny_models import random_ids, randomised, tiny_config, tiny_model

LIMITS = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
"""Of a relative error."""

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "positions": "learned",
        "block": {
            "norm": "layer",
            "attention": {"heads": 4, "bias": True},
            "feed": {"kind": "mlp", "activation": "gelu_new", "bias": True},
        },
    },
    "llama": {"positions": "rope", "block": {"attention": {"heads": 4, "kv_heads": 2}}},
    "with dropout": {
        "block": {"norm": "layer", "attention": {"heads": 4, "bias": True}, "feed": {"kind": "mlp", "bias": True}}
    },
    "papaformer": {
        "positions": {"kind": "rope", "pairs": "interleaved"},
        "block": {"attention": {"heads": 4, "out_projection": False, "window": 5}, "feed": {"kind": "geglu"}},
    },
}

BLOCK = {
    "norm": "layer",
    "attention": {"heads": 1, "bias": True},
    "feed": {"kind": "mlp", "activation": "gelu_new", "hidden": 24, "bias": True},
}
EXPERTS = {"experts": {"names": 4, "router": {"top_k": 2, "compute": "sparse"}}}
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
                    "paths": 4,
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
    "rotary beside experts": {
        "positions": "rope",
        "block": {
            "attention": {"heads": 4},
            "feed": {"hidden": 8, "experts": {"names": 4, "router": {"compute": "sparse"}}},
        },
    },
}
"""In a narrow type tokens may choose otherwise, so these are compared in float32 only."""


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


def close(found: Tensor, wanted: Tensor, limit: float, what: str) -> None:
    error = relative_error(found, wanted)
    assert error <= limit, f"{what}: relative error {error:.2e}"


def compare(
    fused: Callable[..., Any], plain: Callable[..., Any], inputs: Sequence[Tensor | None], dtype: torch.dtype, what: str
) -> None:
    """Both on the same numbers; floating inputs are differentiated."""
    ours = [x if x is None or not x.is_floating_point() else x.detach().requires_grad_() for x in inputs]
    theirs = [x if x is None or not x.is_floating_point() else x.detach().double().requires_grad_() for x in inputs]
    found, wanted = fused(*ours), plain(*theirs)
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
    weights = [torch.randn(f.shape, device=f.device).to(f.dtype) for f in found]
    for index, (f, w) in enumerate(zip(found, wanted, strict=True)):
        close(f, w, LIMITS[dtype], f"{what}, output {index}")
    leaves = [index for index, x in enumerate(ours) if x is not None and x.requires_grad]
    ours_gradients = torch.autograd.grad(found, [ours[i] for i in leaves], weights)
    theirs_gradients = torch.autograd.grad(wanted, [theirs[i] for i in leaves], [w.double() for w in weights])
    for index, f, w in zip(leaves, ours_gradients, theirs_gradients, strict=True):
        assert f.dtype == inputs[index].dtype
        close(f, w, LIMITS[dtype], f"{what}, gradient of input {index}")


def check_norms(device: str, dtype: torch.dtype) -> None:
    for width in (16, 48, 384):
        for centred in (True, False):
            for adds, delta_bias, bias in ((False, False, True), (True, True, True), (True, False, False)):

                def wide(present: bool = True, width: int = width) -> Tensor | None:
                    return torch.randn(width, device=device) if present else None

                stream, delta = (torch.randn(150, width, device=device).to(dtype) for _ in range(2))
                inputs = [stream, delta if adds else None, wide(delta_bias), wide(), wide(bias and centred)]
                compare(
                    lambda *x, c=centred: AddNorm.apply(*x, 1e-5, c, Sums(1), None, None),
                    lambda *x, c=centred: plain_add_norm(*x, 1e-5, c),
                    inputs,
                    dtype,
                    f"norm {width=} {centred=} {adds=} {delta_bias=}",
                )


def check_activations(device: str, dtype: torch.dtype) -> None:
    for kind in ("gelu", "gelu_new", "relu", "silu"):
        for gated in (False, True):
            for width, biased in ((24, True), (300, False)):
                inner = torch.randn(300, 2 * width if gated else width, device=device).to(dtype)
                bias = torch.randn(inner.shape[1], device=device) if biased else None
                compare(
                    lambda *x, k=kind, g=gated: Activation.apply(*x, k, g, Sums(1), None, None),
                    lambda *x, k=kind, g=gated: plain_activation(*x, k, g),
                    [inner, bias],
                    dtype,
                    f"activation {kind=} {gated=} {biased=}",
                )


def check_heads(device: str, dtype: torch.dtype) -> None:
    for dim, kv_heads in ((16, 2), (24, 1)):
        for turn in (None, "halves", "interleaved"):
            time, heads = 70, 2 + 2 * kv_heads
            qkv = torch.randn(3, time, heads, dim, device=device).to(dtype)
            angle = torch.rand(time, dim, device=device) * 6
            tables = None if turn is None else (angle.cos(), angle.sin())
            compare(
                lambda *x, t=tables, n=turn == "interleaved", k=kv_heads: SplitHeads.apply(
                    x[0], None, t, n, k, Sums(1), None
                ),
                lambda *x, t=tables, n=turn == "interleaved", k=kv_heads: plain_split_heads(x[0], t, n, k),
                [qkv],
                dtype,
                f"heads {dim=} {turn=}",
            )
            bias = torch.zeros(heads * dim, device=device, requires_grad=True)
            leaf = qkv.detach().requires_grad_()
            parts = SplitHeads.apply(leaf, bias, tables, turn == "interleaved", kv_heads, Sums(1), None)
            sum((p * torch.randn_like(p)).sum() for p in parts).backward()
            close(bias.grad, leaf.grad.double().sum((0, 1)).flatten(), LIMITS[dtype], "the bias's gradient")


class Left:
    """What a head has left for the embedding."""

    def __init__(self, gradient: Tensor):
        self.gradient = gradient

    def read(self) -> Tensor:
        return self.gradient


def check_embedding(device: str, dtype: torch.dtype) -> None:
    for width, context in ((48, 9), (16, 12), (16, None)):
        tokens = torch.randn(11, width, device=device)
        positions = None if context is None else torch.randn(context, width, device=device)
        ids = torch.randint(0, 11, (20, 9), device=device)
        inputs = [ids, tokens, positions]
        compare(lambda *x: Embed.apply(*x, dtype, None), plain_embed, inputs, dtype, f"embedding {context=}")
        leaf, left = tokens.detach().requires_grad_(), torch.randn_like(tokens)
        Embed.apply(ids, leaf, positions, dtype, Left(left.clone())).sum().backward()
        wanted = left.double() + torch.bincount(ids.flatten(), minlength=11)[:, None]
        close(leaf.grad, wanted, LIMITS[dtype], "a gradient added to what the head has left")


def check_routers(device: str, dtype: torch.dtype) -> None:
    """Choices made in float32 of the same narrow stream are the same."""
    for width, choices, top_k in ((24, 4, 2), (192, 5, 1), (48, 17, 3)):
        for renormalise, balanced in ((True, False), (False, True)):
            stream, weight = torch.randn(70, width, device=device).to(dtype), torch.randn(choices, width, device=device)
            bias = torch.randn(choices, device=device)
            balance = 0.1 * torch.randn(choices, device=device) if balanced else None

            def differentiable(made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                return made[:3] + made[4:]

            def fused(*x: Tensor, b: Any = balance, k: int = top_k, r: bool = renormalise) -> tuple[Tensor, ...]:
                return differentiable(Route.apply(*x, b, k, r, Sums(1)))

            def plain(*x: Tensor, b: Any = balance, k: int = top_k, r: bool = renormalise) -> tuple[Tensor, ...]:
                return differentiable(plain_route(*x, b if b is None else b.double(), k, r))

            compare(fused, plain, [stream, weight, bias], dtype, f"router {choices=} {top_k=} {renormalise=}")
            ours = Route.apply(stream, weight, bias, balance, top_k, renormalise, Sums(1))[3]
            theirs = plain_route(stream.double(), weight.double(), bias.double(), balance, top_k, renormalise)[3]
            assert torch.equal(ours, theirs)


def check_norms_with_routers(device: str, dtype: torch.dtype) -> None:
    """In a narrow type the normalised stream is rounded before it is routed, so there the sum alone is."""
    for centred, affine, reads_normed in ((True, True, False), (True, False, False), (False, True, True)):
        if reads_normed and dtype != torch.float32:
            continue
        stream, delta = (torch.randn(70, 48, device=device).to(dtype) for _ in range(2))
        delta_bias, router, router_bias = (torch.randn(*s, device=device) for s in ((48,), (4, 48), (4,)))
        weight = torch.randn(48, device=device) if affine else None
        bias = torch.randn(48, device=device) if affine and centred else None
        config = (None, 1e-5, centred, reads_normed, 2, True)

        def fused(*x: Tensor, config: Any = config) -> tuple[Tensor, ...]:
            made = AddNormRoute.apply(*x, config[0], NormRouteConfig(*config[1:], Sums(1)))
            return made[:4] + made[5:]

        def plain(*x: Tensor, config: Any = config) -> tuple[Tensor, ...]:
            scale = torch.ones_like(x[2]) if x[3] is None else x[3]
            made = plain_add_norm_route(*x[:3], scale, *x[4:], *config)
            return made[:4] + made[5:]

        if dtype == torch.float32:
            inputs = [stream, delta, delta_bias, weight, bias, router, router_bias]
            compare(fused, plain, inputs, dtype, f"norm with router {centred=} {affine=} {reads_normed=}")


def check_rows(device: str, dtype: torch.dtype) -> None:
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(60)]).to(device)
    permutation = permute(chosen, 4, 2, tile=16)
    real = (permutation.source >= 0)[:, None]
    stream = torch.randn(60, 24, device=device).to(dtype)
    delta = torch.randn(permutation.rows, 24, device=device).to(dtype)
    for centred in (True, False):

        def rows(context: Callable[..., tuple[Tensor, ...]], s: Tensor, d: Tensor, *config: Any) -> tuple[Tensor, ...]:
            return tuple(torch.where(real, x, 0.0) for x in context(s, torch.where(real, d, 0.0), permutation, *config))

        compare(
            lambda s, d, c=centred: rows(AddNormRows.apply, s, d, Norm(1e-5, c)),
            lambda s, d, c=centred: rows(plain_add_norm_rows, s, d, 1e-5, c),
            [stream, delta],
            dtype,
            f"rows {centred=}",
        )
    seed = torch.tensor([5], device=device)
    ones, nothing = torch.ones(permutation.rows, 24, device=device), torch.zeros(60, 24, device=device)
    nothing.requires_grad_(), ones.requires_grad_()
    kept, normed = AddNormRows.apply(nothing, ones, permutation, Norm(1e-5, True, 0.25, seed))
    share = (kept[real[:, 0]] > 0).float().mean().item()
    assert abs(share - 0.75) < 0.03
    upstream = [torch.where(real, 1.0, 0.0).expand_as(kept), torch.zeros_like(normed)]
    (gradient,) = torch.autograd.grad([kept, normed], ones, upstream)
    torch.testing.assert_close(gradient[real[:, 0]], kept.detach()[real[:, 0]])  # the same are dropped backward


def check_narrowing(device: str, dtype: torch.dtype) -> None:
    parameters = [torch.randn(*shape, device=device) for shape in ((3,), (70, 130), (4, 5, 7), (64, 64))]
    for parameter, copy in cast_all(parameters, dtype).items():
        assert torch.equal(copy, parameter.to(dtype))


def check_adding(device: str, dtype: torch.dtype) -> None:
    stream, delta = (torch.randn(70, 48, device=device).to(dtype) for _ in range(2))
    for bias in (None, torch.randn(48, device=device)):
        compare(AddDelta.apply, plain_add, [stream, delta, bias], dtype, "adding")


def check_dropping(device: str, dtype: torch.dtype) -> None:
    """What is added is dropped by a seed and a slot: all who add drop the same, and the reference is told what."""
    seed, rows, width = torch.tensor([7], device=device), 70, 48
    nothing = torch.zeros(rows, width, device=device)
    kept = AddDelta.apply(nothing, nothing + 1, None, 0.25, seed)
    torch.testing.assert_close(kept.unique().cpu(), torch.tensor([0.0, 1 / 0.75]))
    assert abs((kept > 0).float().mean().item() - 0.75) < 0.03
    stream, delta = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
    bias, weight, shift = (torch.randn(width, device=device) for _ in range(3))
    compare(
        lambda *x: AddDelta.apply(*x, 0.25, seed),
        lambda s, d, b: s + (d + b) * kept,
        [stream, delta, bias],
        dtype,
        "adding with dropout",
    )
    compare(
        lambda *x: AddNorm.apply(*x, 1e-5, True, Sums(1), None, None, 0.25, seed),
        lambda s, d, b, *w: plain_add_norm(s, (d + b) * kept, None, *w, 1e-5, True),
        [stream, delta, bias, weight, shift],
        dtype,
        "norm with dropout",
    )
    router, router_bias = torch.randn(4, width, device=device), torch.randn(4, device=device)

    def fused(*x: Tensor) -> tuple[Tensor, ...]:
        config = NormRouteConfig(1e-5, True, False, 2, True, Sums(1), dropout=0.25, seed=seed)
        made = AddNormRoute.apply(*x, None, config)
        return made[:4] + made[5:]

    def plain(s: Tensor, d: Tensor, b: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        made = plain_add_norm_route(s, (d + b) * kept, None, *rest, None, 1e-5, True, False, 2, True)
        return made[:4] + made[5:]

    inputs = [stream, delta, bias, weight, shift, router, router_bias]
    compare(fused, plain, inputs, dtype, "norm and router with dropout")


def check_dropout_of_models(device: str, dtype: torch.dtype) -> None:
    """A layer that is computed again in the pass backward drops what it dropped before."""
    for architecture in (MODELS["gpt2"], *list(ROUTED.values())[:2]):
        model, ids = tiny_model(**architecture, dropout=0.3).to(device).train(), random_ids(3, 7).to(device)
        assert has_fused_pass(model.model)
        found = []
        for again in (False, True):
            (model.gradient_checkpointing_enable if again else model.gradient_checkpointing_disable)()
            torch.manual_seed(3)
            hidden, _, _ = fused_stream(model.model, ids)
            hidden.square().sum().backward()
            found.append([hidden.detach(), *(p.grad for p in model.parameters())])
            model.zero_grad(set_to_none=True)
        for once, twice in zip(*found, strict=True):
            assert (once is None) == (twice is None)
            if once is not None:
                torch.testing.assert_close(once, twice, rtol=1e-4, atol=1e-5)


def check_mixing_with_norms_and_routers(device: str, dtype: torch.dtype) -> None:
    """Rows that are mixed on the way are what they are mixed before: the next router sees the same numbers."""
    chosen = torch.stack([torch.randperm(4, device=device)[:2] for _ in range(70)])
    permutation = permute(chosen, 4, 2, 16)
    real = permutation.source >= 0
    rows = torch.where(real[:, None], torch.randn(permutation.rows, 48, device=device), 0.5).to(dtype)
    weights, router, router_bias = (torch.rand(*s, device=device) for s in ((70, 2), (4, 48), (4,)))
    upstream: list[Tensor] = []
    found: list[list[Tensor]] = []
    for together in (True, False):
        leaves = [x.clone().requires_grad_() for x in (rows, weights, router, router_bias)]
        config = NormRouteConfig(1e-5, True, False, 2, True, Sums(1))
        parts = (None, None, *leaves[2:], None, config)
        if together:
            made = CombineNormRoute.apply(*leaves[:2], permutation, None, *parts)
        else:
            made = AddNormRoute.apply(Combine.apply(*leaves[:2], permutation), None, None, *parts)
        upstream = upstream or [torch.randn_like(x) if x.is_floating_point() else x for x in made]
        gradients = torch.autograd.grad([*made[:4], made[5]], leaves, [*upstream[:4], upstream[5]])
        gradients[0][~real] = 0  # of padding in tiles that are not used nothing is said
        found.append([*made, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def check_choice_means(device: str, dtype: torch.dtype) -> None:
    """Of several routers, with padding, with picks that count nothing; only what is differentiated has a gradient."""
    for choices, top_k in ((3, 1), (4, 2), (9, 9)):
        real = torch.rand(3, 150, device=device) < 0.7
        scores = torch.randn(5, 3, 150, choices, device=device)
        probabilities = scores.softmax(-1).requires_grad_()
        weights, chosen = probabilities.detach().topk(top_k)
        weights = torch.where(torch.rand_like(weights) < 0.2, 0.0, weights)
        names = tuple(map(str, range(choices)))
        alike = [Routing("", names, *parts) for parts in zip(probabilities, chosen, weights, strict=True)]
        for measure, of_means in OF_MEANS.items():
            found, wanted = of_means(choice_means(alike, real)), torch.stack([measure(one, real) for one in alike])
            torch.testing.assert_close(found, wanted)
            if measure is switch:
                upstream = torch.randn(5, device=device)
                torch.testing.assert_close(
                    *(torch.autograd.grad(made, probabilities, upstream) for made in (found, wanted))
                )


def check_linear(device: str, dtype: torch.dtype) -> None:
    rows, weight = torch.randn(40, 24, device=device).to(dtype), torch.randn(16, 24, device=device)
    copy = cast_all([weight], dtype)[weight]
    compare(
        lambda r, w: Linear.apply(r, w, copy, None, None),
        lambda r, w: r @ (w + (copy.double() - weight.double())).t(),
        [rows, weight],
        dtype,
        "linear",
    )


class Halved(torch.nn.Module):
    """A dropout whose outcome is known."""

    probability = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class Here:
    """A side stream whose work is done at once; its inputs are held, as on a device."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def work(self, *inputs: Tensor, priority: bool = False) -> nullcontext[None]:
        self.held += inputs
        return nullcontext()

    def last_event(self) -> str:
        return "done"

    def wait_event(self, done: str) -> None:
        assert done == "done"

    def synchronize(self) -> None:
        pass


def check_models(device: str, dtype: torch.dtype) -> None:
    """Whole models round many times: the plain context in the same type says config much that is."""
    for name, architecture in (MODELS | ROUTED if dtype == torch.float32 else MODELS).items():
        model, ids = tiny_model(**architecture).to(device).train(), random_ids(5, 11).to(device)
        weights = torch.randn(5, 11, model.model.width_out, device=device)
        if name == "with dropout":
            for block in model.model.stages:
                block.layers[0].drop = Halved()

        def plain(model: Any, ids: Tensor) -> tuple[Tensor, Routings]:
            embedded = model.embedding(ids)
            return model.stream(embedded, model.span(embedded))

        side = SideStream(torch.device(device)) if device == "cuda" else Here()
        assert has_fused_pass(model.model)
        ways = (fused_stream, partial(fused_stream, side=side))
        found = [results(model, context, ids, weights, dtype, side) for context in ways]
        usual = results(model, plain, ids, weights, dtype, side)
        wanted = results(model.double(), plain, ids, weights.double(), torch.float64, side)
        for what, exact in wanted.items():
            for by_layer in found:
                limit = 4 * relative_error(usual[what], exact) + 2 * LIMITS[dtype]
                close(by_layer[what], exact, limit, f"{name}, {what}")


def results(
    model: Any,
    context: Callable[[Any, Tensor], tuple[Tensor, Routings, *tuple[Tensor | None, ...]]],
    ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    side: Any,
) -> dict[str, Tensor]:
    """The stream, and the gradient of every parameter it depends on."""
    model.zero_grad()
    with torch.autocast(ids.device.type, dtype, enabled=dtype == torch.bfloat16):
        stream, routings, *_ = context(model.model, ids)
    asked = routing_loss(routings, torch.ones_like(ids)) if routings else 0.0
    ((stream * weights).sum() + 30 * asked).backward()
    side.synchronize()
    found = {"stream": stream} | {f"{r.name} weights": r.weights_BTN for r in routings}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_heads_and_embeddings(device: str, dtype: torch.dtype) -> None:
    """A matrix that embedding and head share has one gradient, however many blocks are between them. And autograd gets
    gradients that nobody holds: it would copy others, on a device before they are complete.
    """
    for stages, tie in product((["block"], [{"block": {"layers": 3}}]), (True, False)):
        model = tiny_model(stages=stages, tie_embeddings=tie, **MODELS["gpt2"]).to(device).train()
        ids, side = random_ids(5, 12).to(device), SideStream(torch.device(device)) if device == "cuda" else Here()
        found = []
        for given in (None, side):
            model.zero_grad()
            with (
                mock.patch.object(modeling_braid, "pays", lambda *_, ours=given: ours is not None),
                torch.autocast(device, dtype, enabled=dtype == torch.bfloat16),
            ):
                loss, asked, _ = model.training_losses(ids[:, :-1], ids[:, 1:], None, given)
            assert asked is None
            loss.backward()
            side.synchronize()
            found.append({"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()})
        plain, fused = found
        assert plain.keys() == fused.keys()
        for what, wanted in plain.items():
            close(fused[what], wanted.double(), 4 * LIMITS[dtype], f"{tie=}, {what}")
        for name, parameter in model.named_parameters():
            for held in side.held if isinstance(side, Here) else []:
                assert held.shape != parameter.shape or not torch.equal(held, parameter.grad), f"{name} is held"


def check_losses(positions: str) -> None:
    """Loss and gradients of a model whose products are large enough to be tuned, in bf16, with its head."""
    block = {
        "norm": "layer",
        "attention": {"heads": 4, "bias": True},
        "feed": {"kind": "mlp", "activation": "gelu_new", "bias": True},
    }
    tied = positions == "learned"
    architecture = {"width": 256, "context": 640, "positions": positions, "tie_embeddings": tied, "block": block}
    model = randomised(BraidForCausalLM(tiny_config(4096, **architecture))).cuda().train()
    ids = random_ids(8, 513, vocab_size=4096).cuda()
    ids[:, :100] = 7  # one token's gradient is a sum of many
    labels = ids[:, 1:].clone()
    labels[3, 50:] = IGNORED
    count = (labels != IGNORED).sum().float()

    def found(dtype: torch.dtype, side: SideStream | None, fused: bool) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            if fused:
                loss = model.training_losses(ids[:, :-1], labels, count, side)[0]
            else:
                embedded = model.model.embedding(ids[:, :-1])
                scores = model.head(model.model.stream(embedded, model.model.span(embedded))[0]).flatten(0, 1)
                scores = scores.float() if dtype == torch.bfloat16 else scores
                loss = torch.nn.functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        if side is not None:
            side.synchronize()
        return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}

    ours = [found(torch.bfloat16, side, fused=True) for side in (None, SideStream(torch.device("cuda")))]
    assert _products, "no product was tuned"
    usual = found(torch.bfloat16, None, fused=False)
    model.double()
    for what, exact in found(torch.float64, None, fused=False).items():
        for one in ours:
            close(one[what], exact, 1.5 * relative_error(usual[what], exact) + 1e-3, f"{positions}, {what}")


CHECKS = (
    check_norms,
    check_activations,
    check_heads,
    check_embedding,
    check_linear,
    check_routers,
    check_norms_with_routers,
    check_narrowing,
    check_adding,
    check_dropping,
    check_dropout_of_models,
    check_mixing_with_norms_and_routers,
    check_choice_means,
    check_rows,
    check_models,
    check_heads_and_embeddings,
)


def check_all(device: str, dtype: torch.dtype, checks: Sequence[Callable[[str, torch.dtype], None]] = CHECKS) -> None:
    for check in checks:
        torch.manual_seed(0)
        check(device, dtype)


if __name__ == "__main__":
    check_all("cpu", torch.float32)
    print("equal")
