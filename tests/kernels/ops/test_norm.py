"""The norm after an addition against torch's norms."""

import pytest

pytest.importorskip("triton")
import torch

from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.norm import AddNorm, plain_add_norm
from tests.kernels.comparison import assert_equal_with_gradients


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
        lambda *x: AddNorm.apply(*x, 1e-5, centred, ColumnSums(1), None, None),
        lambda *x: plain_add_norm(*x, 1e-5, centred),
        inputs,
        dtype,
    )
