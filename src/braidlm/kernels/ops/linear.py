"""Linear layers that read low-precision copies of their weights, and these copies, made by one launch for all.

Autocast would launch further kernels for each weight to make the copy and to widen the gradient. The references are
`F.linear` on the low-precision copies and `parameter.to(dtype)`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.launch import addresses
from braidlm.kernels.ops.tuned_products import tuned_product
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import SideStream, current_side_stream, on_side

MAX_SIDE_ROWS = 16384
"""Up to here a product leaves parts of a large GPU idle, so that another one on the side stream pays."""

Casts = dict[Tensor, Tensor]
"""Parameters and their low-precision copies."""


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `dtype`; a GPU returns its float32 accumulators without rounding."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else (a @ b).to(dtype)


def side_if_small(side: SideStream | None, rows: Tensor) -> SideStream | None:
    """The stream for a weight gradient: the side stream where the product over `rows` is small."""
    return side if len(rows) <= MAX_SIDE_ROWS else None


class Linear(torch.autograd.Function):
    """rows [rows, in], weight [out, in], or with `wide` [in, out], its cast, the cast of a bias or None -> [rows, out].

    The next kernel's backward pass sums the gradient of the bias, since it writes this layer's gradient anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, cast: Tensor, bias: Tensor | None, slot: GradientSlot | None,
        wide: bool = False,
    ) -> Tensor:  # fmt: skip
        assert slot is None or slot.input.data_ptr() == rows.data_ptr()
        ctx.save_for_backward(rows, cast)
        ctx.side, ctx.slot, ctx.weight_dtype, ctx.wide = current_side_stream(), slot, weight.dtype, wide
        return tuned_product(rows, cast, transposed=not wide, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, cast = ctx.saved_tensors
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        weight_gradient = None
        if needs_weight and ctx.slot is not None:
            weight_gradient = ctx.slot.submit(gradient)
        elif needs_weight:
            left, right = (rows, gradient) if ctx.wide else (gradient, rows)
            with on_side(ctx.side if ctx.wide else side_if_small(ctx.side, rows), gradient, rows):
                weight_gradient = product(left.t(), right, ctx.weight_dtype)
        rows_gradient = tuned_product(gradient, cast, transposed=ctx.wide) if needs_rows else None
        return rows_gradient, weight_gradient, *[None] * 4


class BiasGradient(torch.autograd.Function):
    """rows [rows, out] that have the bias [out] in them already; it is an input for the sake of its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum(0, dtype=torch.float32)


BLOCK, WARPS = 4096, 4
"""Elements that a program copies."""
COLUMNS = 3
"""Columns of the table, for each program: the address to read from, the elements left there, the offset to write to."""
ALIGNMENT = 64
"""Copies begin at multiples of so many elements, as matrix products require."""


@triton.jit
def _cast(  # type: ignore[no-untyped-def]
    table, casts, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    table += tl.program_id(0) * COLUMNS
    source = tl.load(table).to(tl.pointer_type(tl.float32))
    count, target = tl.load(table + 1), tl.load(table + 2)
    if ALIGNED:
        source, count = tl.multiple_of(source, 16), tl.multiple_of(count, 4)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(source + offsets, mask=offsets < count)
    tl.store(casts + tl.multiple_of(target, 16) + offsets, x.to(casts.dtype.element_ty), mask=offsets < count)


@torch.no_grad()
def cast_all(parameters: list[Tensor], dtype: torch.dtype) -> Casts:
    """Copies of float32 parameters in another type; parameters that have it already are not copied."""
    there = {parameter: parameter.detach() for parameter in parameters if parameter.dtype == dtype}
    parameters = [parameter for parameter in parameters if parameter not in there]
    if not parameters:
        return there
    assert all(p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
    starts, end, table = [], 0, []
    for parameter in parameters:
        starts.append(end)
        for start in range(0, parameter.numel(), BLOCK):
            table += [parameter.data_ptr() + 4 * start, parameter.numel() - start, end + start]
        end += triton.cdiv(parameter.numel(), ALIGNMENT) * ALIGNMENT
    casts = torch.empty(end, dtype=dtype, device=parameters[0].device)
    aligned = all(p.data_ptr() % 16 == 0 and p.numel() % 4 == 0 for p in parameters)
    device_table = addresses(tuple(table), casts.device)
    _cast[(len(table) // COLUMNS,)](device_table, casts, aligned, COLUMNS, BLOCK, num_warps=WARPS)
    return there | {
        p: casts[begin : begin + p.numel()].view(p.shape) for p, begin in zip(parameters, starts, strict=True)
    }
