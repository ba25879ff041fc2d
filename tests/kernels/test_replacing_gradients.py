"""Hand-written gradients against torch's, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.kernels.replacing import RMSNormFunction, SiluProductFunction, is_eager_cpu_training


def equal_with_gradients(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (1, 1, 8)])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_root_mean_square(shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    x = (scale * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    equal_with_gradients(RMSNormFunction.apply(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5), (x, weight))


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8)])
def test_silu_product(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gate, up = gate_up.chunk(2, dim=-1)
    equal_with_gradients(SiluProductFunction.apply(gate_up), F.silu(gate) * up, (gate_up,))


def test_a_non_contiguous_gradient_is_right() -> None:
    gate_up = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    gate, up = gate_up.chunk(2, dim=-1)
    (ours,) = torch.autograd.grad(SiluProductFunction.apply(gate_up).sum(), gate_up)
    (theirs,) = torch.autograd.grad((F.silu(gate) * up).sum(), gate_up)
    torch.testing.assert_close(ours, theirs)


def test_it_is_used_in_eager_cpu_training_only() -> None:
    assert is_eager_cpu_training(torch.zeros(1))
    with torch.no_grad():
        assert not is_eager_cpu_training(torch.zeros(1))
    assert not is_eager_cpu_training(torch.zeros(1, device="meta"))
