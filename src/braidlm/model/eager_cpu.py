"""Gradients written by hand for eager training on a CPU, where nothing fuses small operations by itself.

Each stands in for plain torch operations, which remain the reference and serve everywhere else.
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
        gradient = (upstream * weight).sum_to_size(normed.shape)  # a stack's members may share what they read
        along = (gradient * normed).mean(-1, keepdim=True)
        return gradient.addcmul_(normed, along, value=-1).mul_(scale), weight_gradient, None


class SiluProductFunction(torch.autograd.Function):
    """`silu(gate) * up` of the two halves of one tensor; the halves' gradients are written side by side at once."""

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
    """Rows sorted by expert through their experts' matrices; each expert writes into its place in one tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight_EIO)
        ctx.counts = counts
        made = rows.new_empty(len(rows), weight_EIO.shape[2])
        for expert, (piece, out) in enumerate(zip(rows.split(counts), made.split(counts), strict=True)):
            if bias_EO is None:
                torch.mm(piece, weight_EIO[expert], out=out)
            else:
                torch.addmm(bias_EO[expert], piece, weight_EIO[expert], out=out)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight_EIO = ctx.saved_tensors
        pieces = upstream.split(ctx.counts)
        rows_gradient = weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            rows_gradient = torch.empty_like(rows)
            for piece, weight, out in zip(pieces, weight_EIO, rows_gradient.split(ctx.counts), strict=True):
                torch.mm(piece, weight.T, out=out)
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.empty_like(weight_EIO, memory_format=torch.contiguous_format)
            for piece, read, out in zip(pieces, rows.split(ctx.counts), weight_gradient, strict=True):
                torch.mm(read.T, piece, out=out)
        if ctx.needs_input_grad[2]:
            bias_gradient = torch.stack([piece.sum(0) for piece in pieces])
        return rows_gradient, weight_gradient, bias_gradient, None
