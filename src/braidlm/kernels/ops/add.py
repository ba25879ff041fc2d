"""Adding a layer's output to the stream: one pass over memory forward, and backward only the sum for the bias."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.dropout import DropoutUse, apply_dropout, dropout_into, threshold
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import current_side_stream, on_side

ELEMENTS = 2048
"""Elements of a program's block."""


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    stream, delta, bias, seed, summed, size, width, keep_scale, THRESHOLD: tl.constexpr, ELEMENTS: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offsets < size
    added = tl.load(delta + offsets, mask=mask).to(tl.float32)
    if bias is not None:
        added += tl.load(bias + offsets % width, mask=mask).to(tl.float32)
    x = tl.load(stream + offsets, mask=mask).to(tl.float32)
    x += apply_dropout(added, seed, offsets, keep_scale, THRESHOLD)
    tl.store(summed + offsets, x.to(summed.dtype.element_ty), mask=mask)


class AddDelta(torch.autograd.Function):
    """stream, delta [rows, width], a bias [width] or None -> their sum, with dropout of delta plus bias.

    The side stream sums the gradient of the bias. `slot` belongs to the layer that computed delta.
    """

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        delta: Tensor,
        bias: Tensor | None,
        dropout: float = 0.0,
        seed: Tensor | None = None,
        slot: GradientSlot | None = None,
    ) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.side, ctx.dropout, ctx.slot = current_side_stream(), dropout, slot
        summed = torch.empty_like(stream)
        grid = (triton.cdiv(stream.numel(), ELEMENTS),)
        _add[grid](
            stream, delta, bias, seed, summed, stream.numel(), stream.shape[1], 1 / (1 - dropout), threshold(dropout),
            ELEMENTS, num_warps=4,
        )  # fmt: skip
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (seed,), bias_gradient, delta_gradient = ctx.saved_tensors, None, gradient
        if ctx.dropout:
            out = torch.empty_like(gradient) if ctx.slot is None else ctx.slot.gradient
            delta_gradient = dropout_into(gradient.contiguous(), DropoutUse(ctx.dropout, seed), out)
        if ctx.needs_input_grad[2]:
            with on_side(ctx.side, delta_gradient, priority=True):
                bias_gradient = delta_gradient.sum(0, dtype=torch.float32)
        return gradient, delta_gradient, bias_gradient, *[None] * 3


def plain_add(stream: Tensor, delta: Tensor, bias: Tensor | None) -> Tensor:
    """The reference, in torch's operations."""
    return stream + delta if bias is None else stream + delta + bias
