"""Activations with a bias, gated or not, against torch's."""

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels.ops.activation import Activation, plain_activation
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.dropout import DropoutUse
from tests.kernels.comparison import assert_equal_with_gradients, dropout_factors


@pytest.mark.parametrize("kind", ["gelu", "gelu_new", "relu", "silu"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("width", "biased"), [(24, True), (300, False)], ids=["biased", "wider than a block"])
def test_activation_equals_torch(
    kind: str, gated: bool, width: int, biased: bool, device: str, dtype: torch.dtype
) -> None:
    inner = torch.randn(130, 2 * width if gated else width, device=device).to(dtype)
    bias = torch.randn(inner.shape[1], device=device) if biased else None
    assert_equal_with_gradients(
        lambda *x: Activation.apply(*x, kind, gated, ColumnSums(1), None, None),
        lambda *x: plain_activation(*x, kind, gated),
        [inner, bias],
        dtype,
    )


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_activation_with_dropout_equals_the_reference(gated: bool, device: str, dtype: torch.dtype) -> None:
    dropout = DropoutUse(0.25, torch.tensor([7], device=device))
    inner = torch.randn(130, 80 if gated else 40, device=device).to(dtype)
    bias = torch.randn(inner.shape[1], device=device)
    assert_equal_with_gradients(
        lambda *x: Activation.apply(*x, "gelu_new", gated, ColumnSums(1), None, None, dropout),
        lambda *x: plain_activation(*x, "gelu_new", gated) * dropout_factors(dropout, 130, 40),
        [inner, bias],
        dtype,
    )
