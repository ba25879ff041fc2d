"""Additions to the stream and the norm after them; dropout inside every kernel that adds has the same keep mask."""

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.dropout import DropoutUse
from braidlm.kernels.ops.norm import AddDelta, AddNorm, NormConfig, plain_add, plain_add_norm
from braidlm.kernels.routed.norm_router import AddNormRoute, NormRouteConfig
from tests.kernels.comparison import assert_equal_with_gradients, plain_add_norm_route

ROWS, WIDTH, RATE = 70, 48, 0.25


@pytest.fixture
def seed(device: str) -> Tensor:
    return torch.tensor([7], device=device)


@pytest.fixture
def factors(seed: Tensor) -> Tensor:
    """What dropout multiplies each element by."""
    zeros = torch.zeros(ROWS, WIDTH, device=seed.device)
    return AddDelta.apply(zeros, zeros + 1, None, DropoutUse(RATE, seed))


@pytest.fixture
def inputs(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Stream, delta, the bias of delta, weight and bias of a norm, weight and bias of a router."""
    rows = [torch.randn(ROWS, WIDTH, device=device).to(dtype) for _ in range(2)]
    return rows + [torch.randn(*s, device=device) for s in ((WIDTH,), (WIDTH,), (WIDTH,), (4, WIDTH), (4,))]


def test_dropout_keeps_its_share_and_scales_it(factors: Tensor) -> None:
    torch.testing.assert_close(factors.unique().cpu(), torch.tensor([0.0, 1 / (1 - RATE)]))
    assert abs((factors > 0).float().mean().item() - (1 - RATE)) < 0.03


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_add_equals_torch(biased: bool, inputs: list[Tensor], dtype: torch.dtype) -> None:
    assert_equal_with_gradients(AddDelta.apply, plain_add, [*inputs[:2], inputs[2] if biased else None], dtype)


def test_add_with_dropout_equals_the_reference(
    inputs: list[Tensor], factors: Tensor, seed: Tensor, dtype: torch.dtype
) -> None:
    assert_equal_with_gradients(
        lambda *x: AddDelta.apply(*x, DropoutUse(RATE, seed)), lambda s, d, b: s + (d + b) * factors, inputs[:3], dtype
    )


def test_add_norm_with_dropout_equals_the_reference(
    inputs: list[Tensor], factors: Tensor, seed: Tensor, dtype: torch.dtype
) -> None:
    assert_equal_with_gradients(
        lambda *x: AddNorm.apply(*x, NormConfig(1e-5, True, ColumnSums(1), dropout=DropoutUse(RATE, seed))),
        lambda s, d, b, *w: plain_add_norm(s, (d + b) * factors, None, *w, 1e-5, True),
        inputs[:5],
        dtype,
    )


def test_add_norm_route_with_dropout_equals_the_reference(
    inputs: list[Tensor], factors: Tensor, seed: Tensor, dtype: torch.dtype
) -> None:
    def fused(*x: Tensor) -> tuple[Tensor, ...]:
        config = NormRouteConfig(
            1e-5, True, ColumnSums(1), reads_normed=False, top_k=2, renormalise=True, dropout=DropoutUse(RATE, seed)
        )
        outputs = AddNormRoute.apply(*x, None, config)
        return outputs[:4] + outputs[5:]

    def plain(s: Tensor, d: Tensor, b: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        outputs = plain_add_norm_route(s, (d + b) * factors, None, *rest, None, 1e-5, True, False, 2, True)
        return outputs[:4] + outputs[5:]

    assert_equal_with_gradients(fused, plain, inputs, dtype)


@pytest.mark.parametrize("width", [48, 384])
@pytest.mark.parametrize("centred", [True, False], ids=["layer norm", "RMS norm"])
@pytest.mark.parametrize(
    ("adds", "delta_biased", "biased"),
    [(False, False, True), (True, True, True), (True, False, False)],
    ids=["alone", "after delta and bias", "after delta"],
)
def test_add_norm_equals_torch(
    width: int, centred: bool, adds: bool, delta_biased: bool, biased: bool, device: str, dtype: torch.dtype
) -> None:
    stream, delta = (torch.randn(70 if width < 100 else 20, width, device=device).to(dtype) for _ in range(2))
    delta_bias, weight, bias = (torch.randn(width, device=device) for _ in range(3))
    inputs = [
        stream,
        delta if adds else None,
        delta_bias if delta_biased else None,
        weight,
        bias if biased and centred else None,
    ]
    assert_equal_with_gradients(
        lambda *x: AddNorm.apply(*x, NormConfig(1e-5, centred, ColumnSums(1))),
        lambda *x: plain_add_norm(*x, 1e-5, centred),
        inputs,
        dtype,
    )
