"""Autograd functions with hand-written gradients for eager training on a CPU, where nothing fuses small operations.

Each replaces plain torch operations, which remain the reference and are used everywhere else.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def is_eager_cpu_training(x: Tensor) -> bool:
    """Whether `x` is in an eager pass on a CPU that will be differentiated."""
    return x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling()


class RMSNormFunction(torch.autograd.Function):
    """`F.rms_norm(x, weight)`: torch's own gradient on a CPU costs six times a LayerNorm's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        weight_gradient = (upstream * normed).sum_to_size(weight.shape)
        gradient = (upstream * weight).sum_to_size(normed.shape)  # the members of a stack may share their input
        projection = (gradient * normed).mean(-1, keepdim=True)
        return gradient.addcmul_(normed, projection, value=-1).mul_(scale), weight_gradient, None


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


class GroupedLinearFunction(torch.autograd.Function):
    """Multiply rows sorted by expert by their expert's matrix; every expert writes into its slice of one output."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight_EIO)
        ctx.counts = counts
        outputs = rows.new_empty(len(rows), weight_EIO.shape[2])
        for expert, (own_rows, out) in enumerate(zip(rows.split(counts), outputs.split(counts), strict=True)):
            if bias_EO is None:
                torch.mm(own_rows, weight_EIO[expert], out=out)
            else:
                torch.addmm(bias_EO[expert], own_rows, weight_EIO[expert], out=out)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight_EIO = ctx.saved_tensors
        upstreams = upstream.split(ctx.counts)
        rows_gradient = weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            rows_gradient = torch.empty_like(rows)
            for own_upstream, weight, out in zip(upstreams, weight_EIO, rows_gradient.split(ctx.counts), strict=True):
                torch.mm(own_upstream, weight.T, out=out)
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.empty_like(weight_EIO, memory_format=torch.contiguous_format)
            for own_upstream, own_rows, out in zip(upstreams, rows.split(ctx.counts), weight_gradient, strict=True):
                torch.mm(own_rows.T, own_upstream, out=out)
        if ctx.needs_input_grad[2]:
            bias_gradient = torch.stack([own_upstream.sum(0) for own_upstream in upstreams])
        return rows_gradient, weight_gradient, bias_gradient, None
