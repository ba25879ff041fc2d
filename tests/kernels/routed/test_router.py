"""Routers, alone and fused with the norm and the sum before them, against torch's operations."""

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.routed.combine import Combine
from braidlm.kernels.routed.norm_router import AddNormRoute, NormRouteConfig
from braidlm.kernels.routed.permutation import permute
from braidlm.kernels.routed.router import Route, RouterInner, plain_route, plain_router_inner
from tests.kernels.comparison import assert_equal_with_gradients, plain_add_norm_route


@pytest.mark.parametrize(("width", "choices", "top_k"), [(24, 4, 2), (192, 3, 1), (192, 5, 1), (48, 17, 3)])
@pytest.mark.parametrize(
    ("renormalise", "balanced"), [(True, False), (False, True)], ids=["renormalised", "with balance"]
)
def test_route_equals_torch(
    width: int, choices: int, top_k: int, renormalise: bool, balanced: bool, device: str, dtype: torch.dtype
) -> None:
    """Choices are computed in float32 from the same stream, so they are equal in every type."""
    stream, weight = torch.randn(70, width, device=device).to(dtype), torch.randn(choices, width, device=device)
    bias = torch.randn(choices, device=device)
    balance = 0.1 * torch.randn(choices, device=device) if balanced else None
    chosen = []

    def fused(*x: Tensor) -> tuple[Tensor, ...]:
        outputs = Route.apply(*x, balance, top_k, renormalise, ColumnSums(1))
        chosen.append(outputs[3])
        return outputs[:3] + outputs[4:]

    def plain(*x: Tensor) -> tuple[Tensor, ...]:
        outputs = plain_route(*x, None if balance is None else balance.double(), top_k, renormalise)
        chosen.append(outputs[3])
        return outputs[:3] + outputs[4:]

    assert_equal_with_gradients(fused, plain, [stream, weight, bias], dtype)
    assert torch.equal(*chosen)


@pytest.mark.parametrize(
    ("centred", "affine", "reads_normed"),
    [(True, True, False), (True, False, False), (False, True, True)],
    ids=["layer norm", "folded layer norm", "RMS norm, normalised stream routed"],
)
def test_add_norm_route_equals_torch(centred: bool, affine: bool, reads_normed: bool, device: str) -> None:
    """In float32 only: a normalised stream that is rounded before it is routed may choose otherwise."""
    stream, delta = (torch.randn(70, 48, device=device) for _ in range(2))
    delta_bias, router, router_bias = (torch.randn(*s, device=device) for s in ((48,), (4, 48), (4,)))
    weight = torch.randn(48, device=device) if affine else None
    bias = torch.randn(48, device=device) if affine and centred else None
    options = (1e-5, centred, reads_normed, 2, True)

    def fused(*x: Tensor) -> tuple[Tensor, ...]:
        config = NormRouteConfig(1e-5, centred, ColumnSums(1), reads_normed=reads_normed, top_k=2, renormalise=True)
        outputs = AddNormRoute.apply(*x, None, config)
        return outputs[:4] + outputs[5:]

    def plain(*x: Tensor) -> tuple[Tensor, ...]:
        scale = torch.ones_like(x[2]) if x[3] is None else x[3]
        outputs = plain_add_norm_route(*x[:3], scale, *x[4:], None, *options)
        return outputs[:4] + outputs[5:]

    inputs = [stream, delta, delta_bias, weight, bias, router, router_bias]
    assert_equal_with_gradients(fused, plain, inputs, torch.float32)


def test_combine_norm_route_equals_combine_then_norm_route(device: str, dtype: torch.dtype) -> None:
    """The next router reads the same numbers, whether rows are combined before or in the same kernel."""
    chosen = torch.stack([torch.randperm(4, device=device)[:2] for _ in range(70)])
    permutation = permute(chosen, 4, 2, 16)
    real = permutation.source >= 0
    rows = torch.where(real[:, None], torch.randn(permutation.rows, 48, device=device), 0.5).to(dtype)
    weights, router, router_bias = (torch.rand(*s, device=device) for s in ((70, 2), (4, 48), (4,)))
    upstream: list[Tensor] = []
    results: list[list[Tensor]] = []
    for together in (True, False):
        leaves = [x.clone().requires_grad_() for x in (rows, weights, router, router_bias)]
        pair = leaves[:2] if together else (Combine.apply(*leaves[:2], permutation), None)
        config = NormRouteConfig(
            1e-5, True, ColumnSums(1), reads_normed=False, top_k=2, renormalise=True,
            permutation=permutation if together else None,
        )  # fmt: skip
        outputs = AddNormRoute.apply(*pair, None, None, None, *leaves[2:], None, config)
        upstream = upstream or [torch.randn_like(x) if x.is_floating_point() else x for x in outputs]
        gradients = torch.autograd.grad([*outputs[:4], outputs[5]], leaves, [*upstream[:4], upstream[5]])
        gradients[0][~real] = 0  # padding of unused tiles is undefined
        results.append([*outputs, *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_first_layer_of_two_equals_torch(activation: str, device: str, dtype: torch.dtype) -> None:
    rows, weight = torch.randn(70, 24, device=device).to(dtype), torch.randn(12, 24, device=device)
    bias = torch.randn(12, device=device)
    assert_equal_with_gradients(
        lambda *x: RouterInner.apply(*x, activation),
        lambda *x: plain_router_inner(*x, activation),
        [rows, weight, bias],
        dtype,
    )


@pytest.mark.gpu
def test_the_first_layer_of_two_is_exact_from_half_precision_rows() -> None:
    rows, weight = torch.randn(512, 384, device="cuda").bfloat16(), torch.randn(96, 384, device="cuda")
    exact = plain_router_inner(rows.double(), weight.double(), torch.zeros(96, device="cuda").double(), "gelu")
    ours = RouterInner.apply(rows, weight, torch.zeros(96, device="cuda"), "gelu")
    assert ((ours - exact).norm() / exact.norm()).item() < 1e-5, "as good as 16 bits of each weight"
