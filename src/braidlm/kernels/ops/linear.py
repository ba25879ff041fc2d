"""A linear layer that reads a narrow copy of its weight and writes the gradient of the wide one.

Autocast would make the copy and widen the gradient in kernels of their own, for each weight. The reference is
`F.linear` on the narrow copies.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.tuned_products import tuned_product
from braidlm.kernels.side_stream import SideStream, current_side_stream, on_side

FEW_ROWS = 16384
"""Up to here a product leaves parts of a large GPU idle, and another one beside it pays."""

Casts = dict[Tensor, Tensor]
"""Copies of parameters in the type of the matrix products."""


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `dtype`; a GPU gives its float32 sums as they are."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else (a @ b).to(dtype)


def side_if_small(side: SideStream | None, rows: Tensor) -> SideStream | None:
    """Where the gradient of a weight that is read by `rows` is made."""
    return side if len(rows) <= FEW_ROWS else None


class Linear(torch.autograd.Function):
    """rows [rows, in], weight [out, in], its copy, a copy of a bias or None -> [rows, out].

    The gradient of the bias is not made here: whatever comes next reads this layer's gradient anyway and sums it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        copy: Tensor,
        bias: Tensor | None,
        slot: GradientSlot | None,
    ) -> Tensor:
        assert slot is None or slot.input.data_ptr() == rows.data_ptr()
        ctx.save_for_backward(rows, copy)
        ctx.side, ctx.slot, ctx.wide = current_side_stream(), slot, weight.dtype
        return tuned_product(rows, copy, transposed=True, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, copy = ctx.saved_tensors
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        weight_gradient = None
        if needs_weight and ctx.slot is not None:
            weight_gradient = ctx.slot.submit(gradient)
        elif needs_weight:
            with on_side(side_if_small(ctx.side, rows), gradient, rows):
                weight_gradient = product(gradient.t(), rows, ctx.wide)
        return tuned_product(gradient, copy) if needs_rows else None, weight_gradient, None, None, None
