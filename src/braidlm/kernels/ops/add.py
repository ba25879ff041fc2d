"""Adding to the stream what a layer has pending: one pass over memory, and backward none but for the bias."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.dropout import apply_dropout, dropped, threshold
from braidlm.kernels.side_stream import current_side_stream, on_side

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS = 2048
"""That a program works on."""


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    stream, delta, bias, seed, summed, size, width, keep_scale, THRESHOLD: tl.constexpr, NUMBERS: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = offsets < size
    added = tl.load(delta + offsets, mask=inside).to(tl.float32)
    if bias is not None:
        added += tl.load(bias + offsets % width, mask=inside).to(tl.float32)
    x = tl.load(stream + offsets, mask=inside).to(tl.float32)
    x += apply_dropout(added, seed, offsets, keep_scale, THRESHOLD)
    tl.store(summed + offsets, x.to(summed.dtype.element_ty), mask=inside)


class AddDelta(torch.autograd.Function):
    """stream, delta [rows, width], a bias [width] or None -> their sum; delta with its bias may be dropped by chance.

    The bias has its gradient made side. `slot` is of the layer that made delta.
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
        grid = (triton.cdiv(stream.numel(), NUMBERS),)
        _add[grid](
            stream, delta, bias, seed, summed, stream.numel(), stream.shape[1], 1 / (1 - dropout), threshold(dropout),
            NUMBERS, num_warps=4,
        )  # fmt: skip
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (seed,), bias_gradient, delta_gradient = ctx.saved_tensors, None, gradient
        if ctx.dropout:
            to = torch.empty_like(gradient) if ctx.slot is None else ctx.slot.gradient
            delta_gradient = dropped(gradient.contiguous(), ctx.dropout, seed, to)
        if ctx.needs_input_grad[2]:
            with on_side(ctx.side, delta_gradient, priority=True):
                bias_gradient = delta_gradient.sum(0, dtype=torch.float32)
        return gradient, delta_gradient, bias_gradient, *[None] * 3


def plain_add(stream: Tensor, delta: Tensor, bias: Tensor | None) -> Tensor:
    """The reference, in torch's operations."""
    return stream + delta if bias is None else stream + delta + bias
