"""Adding to the stream what a layer has written: one pass over memory, and backward none but for the bias."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .aside import Aside, beside

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS = 2048
"""That a program works on."""


@triton.jit
def _add(stream, delta, bias, summed, size, width, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = place < size
    x = tl.load(stream + place, mask=inside).to(tl.float32) + tl.load(delta + place, mask=inside).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + place % width, mask=inside).to(tl.float32)
    tl.store(summed + place, x.to(summed.dtype.element_ty), mask=inside)


class AddDelta(torch.autograd.Function):
    """stream, delta [rows, width], a bias [width] or None -> their sum. The bias has its gradient made aside."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, delta: Tensor, bias: Tensor | None, aside: Aside | None) -> Tensor:
        ctx.aside = aside
        summed = torch.empty_like(stream)
        grid = (triton.cdiv(stream.numel(), NUMBERS),)
        _add[grid](stream, delta, bias, summed, stream.numel(), stream.shape[1], NUMBERS, num_warps=4)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        bias_gradient = None
        if ctx.needs_input_grad[2]:
            with beside(ctx.aside, gradient):
                bias_gradient = gradient.sum(0, dtype=torch.float32)
        return gradient, gradient, bias_gradient, None


def plain_add(stream: Tensor, delta: Tensor, bias: Tensor | None) -> Tensor:
    """The reference, in torch's operations."""
    return stream + delta if bias is None else stream + delta + bias
