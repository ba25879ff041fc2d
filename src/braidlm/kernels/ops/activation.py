"""Bias, activation and dropout of a feed-forward part, gated or not: one pass over memory forward and one backward.

The backward pass also sums the gradient of the bias.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse, apply_dropout
from braidlm.kernels.ops.launch import is_nvidia, programs_for
from braidlm.kernels.optional_triton import tl, triton

ROWS, COLUMNS, WARPS = 4, 256, 1
PROGRAMS_PER_SM = 16


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)); NVIDIA's approximate exponential and reciprocal have a relative error of about 2^-22."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.ftz.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.ftz.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def value_and_derivative(x, KIND: tl.constexpr, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == "relu":
        value = tl.maximum(x, 0.0)
        derivative = tl.where(x > 0.0, 1.0, 0.0)
    elif KIND == "silu":
        sigmoid = _sigmoid(x, FAST)
        value = x * sigmoid
        derivative = sigmoid + value * (1.0 - sigmoid)
    elif KIND == "gelu_new":
        # 0.5 (1 + tanh(u)) is sigmoid(2u).
        square = x * x
        sigmoid = _sigmoid(x * (1.5957691216057308 + 0.07135481282987854 * square), FAST)
        value = x * sigmoid
        derivative = sigmoid + value * (1.0 - sigmoid) * (1.5957691216057308 + 0.21406443848963562 * square)
    else:
        tl.static_assert(KIND == "gelu")
        sigmoid = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * sigmoid
        derivative = sigmoid + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return value, derivative


@triton.jit
def _activation_forward(  # type: ignore[no-untyped-def]
    inner, bias, seed, outer, rows, width, keep_scale, KIND: tl.constexpr, GATED: tl.constexpr, FAST: tl.constexpr,
    THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    column_mask = column < width
    mask = (row < rows) & column_mask
    offsets = row.to(tl.int64) * width * (2 if GATED else 1) + column
    x = tl.load(inner + offsets, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)
    value, _ = value_and_derivative(x, KIND, FAST)
    if GATED:
        up = tl.load(inner + offsets + width, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            up += tl.load(bias + width + column, mask=column_mask, other=0.0).to(tl.float32)
        value *= up
    offsets = row.to(tl.int64) * width + column
    value = apply_dropout(value, seed, offsets, keep_scale, THRESHOLD)
    tl.store(outer + offsets, value.to(outer.dtype.element_ty), mask=mask)


@triton.jit
def _activation_backward(  # type: ignore[no-untyped-def]
    inner, bias, seed, outer_gradient, inner_gradient, sums, rows, width, keep_scale,
    KIND: tl.constexpr, GATED: tl.constexpr, FAST: tl.constexpr, THRESHOLD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(1), tl.num_programs(1)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    column_mask = column < width
    x_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    if bias is not None:
        x_bias = tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias + width + column, mask=column_mask, other=0.0).to(tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        mask = (row < rows) & column_mask
        offsets = row.to(tl.int64) * width * (2 if GATED else 1) + column
        x = tl.load(inner + offsets, mask=mask, other=0.0).to(tl.float32)
        outer_offsets = row.to(tl.int64) * width + column
        gradient = tl.load(outer_gradient + outer_offsets, mask=mask, other=0.0).to(tl.float32)
        gradient = apply_dropout(gradient, seed, outer_offsets, keep_scale, THRESHOLD)
        if bias is not None:
            x += x_bias
        value, derivative = value_and_derivative(x, KIND, FAST)
        x_gradient = gradient * derivative
        if GATED:
            up = tl.load(inner + offsets + width, mask=mask, other=0.0).to(tl.float32)
            if bias is not None:
                up += up_bias
            x_gradient *= up
            up_gradient = gradient * value
            tl.store(inner_gradient + offsets + width, up_gradient.to(inner_gradient.dtype.element_ty), mask=mask)
            if bias is not None:
                up_sum += up_gradient
        tl.store(inner_gradient + offsets, x_gradient.to(inner_gradient.dtype.element_ty), mask=mask)
        if bias is not None:
            x_sum += x_gradient
    if bias is not None:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        start = sums + program * width * (2 if GATED else 1) + column
        tl.store(start, tl.sum(x_sum, 0), mask=column < width)
        if GATED:
            tl.store(start + width, tl.sum(up_sum, 0), mask=column < width)


class Activation(torch.autograd.Function):
    """inner [rows, width], or gate and up concatenated [rows, 2 width], a bias as wide or None -> outer [rows, width].

    `inner_slot` belongs to the layer before, `outer_slot` to the layer that reads the result.
    """

    @staticmethod
    def forward(
        ctx: Any, inner: Tensor, bias: Tensor | None, kind: str, gated: bool, sums: ColumnSums,
        inner_slot: GradientSlot | None, outer_slot: GradientSlot | None, dropout: DropoutUse = NO_DROPOUT,
    ) -> Tensor:  # fmt: skip
        rows, width = inner.shape[0], inner.shape[1] // (2 if gated else 1)
        outer = inner.new_empty(rows, width) if outer_slot is None else outer_slot.input
        grid = (triton.cdiv(width, COLUMNS), triton.cdiv(rows, ROWS))
        _activation_forward[grid](
            inner, bias, dropout.seed, outer, rows, width, dropout.keep_scale, kind, gated, is_nvidia(inner),
            dropout.threshold, ROWS, COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(inner, bias)
        ctx.kind, ctx.gated, ctx.sums, ctx.inner_slot, ctx.dropout = kind, gated, sums, inner_slot, dropout
        return outer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inner, bias), dropout = ctx.saved_tensors, ctx.dropout
        rows, width = outer_gradient.shape
        gradient = torch.empty_like(inner) if ctx.inner_slot is None else ctx.inner_slot.gradient
        columns = triton.cdiv(width, COLUMNS)
        programs = programs_for(inner.device, PROGRAMS_PER_SM, triton.cdiv(rows, ROWS), columns)
        sums = None if bias is None else ctx.sums.buffer(programs, inner.shape[1], inner.device)
        _activation_backward[(columns, programs)](
            inner, bias, dropout.seed, outer_gradient.contiguous(), gradient, sums, rows, width, dropout.keep_scale,
            ctx.kind, ctx.gated, is_nvidia(inner), dropout.threshold, ROWS, COLUMNS, num_warps=WARPS,
        )  # fmt: skip
        return gradient, None if sums is None else ctx.sums.total(), *[None] * 6


def plain_activation(inner: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
    """The reference, in torch's operations."""
    inner = inner if bias is None else inner + bias
    gate, up = inner.chunk(2, dim=-1) if gated else (inner, None)
    tanh = {"approximate": "tanh"} if kind == "gelu_new" else {}
    value = getattr(F, kind.removesuffix("_new"))(gate, **tanh)
    return value if up is None else value * up
