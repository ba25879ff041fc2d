"""Swish-gated feed-forward parts on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.replacing import is_eager_cpu_training, replaces
from braidlm.model.feed.feeds import SwiGLU
from braidlm.model.routing.dispatch import Groups


@replaces(SwiGLU, on=("cpu",))
class CpuSwiGLU(SwiGLU):
    """In training, with a gradient that is written by hand."""

    def activate(self, gate_up: Tensor, groups: Groups | None) -> Tensor:
        if self.beta is None and is_eager_cpu_training(gate_up):
            return SiluProductFunction.apply(gate_up)  # type: ignore[no-any-return]
        return super().activate(gate_up, groups)


class SiluProductFunction(torch.autograd.Function):
    """`silu(gate) * up` of the two halves of one tensor; both gradients are written into one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        swish = F.silu(gate)
        ctx.save_for_backward(gate_up, swish)
        return swish * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        gate_up, swish = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gradient = torch.empty_like(gate_up)
        gate_gradient, up_gradient = gradient.chunk(2, dim=-1)
        torch.mul(upstream, swish, out=up_gradient)
        torch.mul(upstream, up, out=gate_gradient)
        torch.ops.aten.silu_backward.grad_input(gate_gradient, gate, grad_input=gate_gradient)
        return gradient
