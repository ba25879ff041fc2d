"""Adding to the stream and normalising it: one pass over memory forward and one backward.

The backward pass also sums the gradients of the norm's weight and bias and of the bias of the layer whose output is
added: each program sums its rows, and `ColumnSums` adds up the programs.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse, apply_dropout, dropout_into
from braidlm.kernels.ops.launch import programs_for, row_tile
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import DeferredGradient, SideStream, current_side_stream, on_side

VECTORS = 3
"""Summed backward: gradients of the norm's weight, its bias and the bias of the layer before (some may be unused)."""
PROGRAMS_PER_SM, TILES_PER_PROGRAM = 16, 8
"""A maximum and a minimum, backward: each program writes partial sums, so it should have some rows to sum."""
STAGES = tl.constexpr(3)
ELEMENTS = 2048
"""Elements of a program that adds without a norm."""


@triton.jit
def tile_of_program(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of this program, all columns, which columns and elements there are, and the elements' offsets."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    column_mask = column < width
    mask = (row < rows)[:, None] & column_mask
    return row, column, column_mask, mask, row.to(tl.int64)[:, None] * width + column


@triton.jit
def addition(  # type: ignore[no-untyped-def]
    delta, bias, seed, offsets, mask, column, column_mask, keep_scale, THRESHOLD: tl.constexpr
):
    """What a layer adds to the stream: its output and bias, after dropout."""
    added = tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        added += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)
    return apply_dropout(added, seed, offsets, keep_scale, THRESHOLD)


@triton.jit
def stored(x, out, offsets, mask):  # type: ignore[no-untyped-def]
    """Store a tile; returns it as all others read it, rounded."""
    rounded = x.to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask=mask)
    return rounded.to(tl.float32)


@triton.jit
def store_gradients(  # type: ignore[no-untyped-def]
    x_gradient, gradient, delta_gradient, seed, offsets, mask, keep_scale, THRESHOLD: tl.constexpr
):
    """Store the gradient of the stream, and, where dropout makes it another, of what was added; returns the latter."""
    tl.store(gradient + offsets, x_gradient.to(gradient.dtype.element_ty), mask=mask)
    if THRESHOLD:
        x_gradient = apply_dropout(x_gradient, seed, offsets, keep_scale, THRESHOLD)
        tl.store(delta_gradient + offsets, x_gradient.to(delta_gradient.dtype.element_ty), mask=mask)
    return x_gradient


@triton.jit
def normalised(  # type: ignore[no-untyped-def]
    x, weight, bias, means, rstds, row, rows, width, eps, column, column_mask, mask, CENTRED: tl.constexpr
):
    """Rows after the norm; stores what the backward pass needs of each."""
    if CENTRED:
        mean = tl.sum(x, 1) / width
        tl.store(means + row, mean, mask=row < rows)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(rstds + row, rstd, mask=row < rows)
    y = x * rstd[:, None]
    if weight is not None:
        y *= tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def norm_gradient(x_gradient, x, rstd, width, CENTRED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of rows from that of the rows `x`, which are normalised and not yet scaled."""
    projection = tl.sum(x_gradient * x, 1)[:, None] / width
    if CENTRED:
        x_gradient -= tl.sum(x_gradient, 1)[:, None] / width
    return (x_gradient - x * projection) * rstd


@triton.jit
def store_vector_sums(  # type: ignore[no-untyped-def]
    sums, offset, weight_sum, bias_sum, delta_bias_sum, width,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr, DELTA_BIASED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a program's sums at its offset: for the norm's weight, its bias and the bias of the layer before."""
    column = tl.arange(0, COLUMNS)
    sums += offset + column
    if WEIGHTED:
        tl.store(sums, tl.sum(weight_sum, 0), mask=column < width)
    if BIASED:
        tl.store(sums + width, tl.sum(bias_sum, 0), mask=column < width)
    if DELTA_BIASED:
        tl.store(sums + 2 * width, tl.sum(delta_bias_sum, 0), mask=column < width)


@triton.jit
def _norm_forward(  # type: ignore[no-untyped-def]
    stream, delta, delta_bias, weight, bias, seed, summed, normed, means, rstds, rows, width, eps, keep_scale,
    CENTRED: tl.constexpr, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, column_mask, mask, offsets = tile_of_program(rows, width, ROWS, COLUMNS)
    x = tl.load(stream + offsets, mask=mask, other=0.0).to(tl.float32)
    if delta is not None:
        x += addition(delta, delta_bias, seed, offsets, mask, column, column_mask, keep_scale, THRESHOLD)
        x = stored(x, summed, offsets, mask)  # normalise the stream as all other layers read it
    y = normalised(x, weight, bias, means, rstds, row, rows, width, eps, column, column_mask, mask, CENTRED)
    tl.store(normed + offsets, y.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    normed_gradient, summed_gradient, summed, weight, means, rstds, seed, gradient, delta_gradient, sums, rows, width,
    keep_scale, CENTRED: tl.constexpr, BIASED: tl.constexpr, DELTA_BIASED: tl.constexpr, THRESHOLD: tl.constexpr,
    VECTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)[None, :]
    column_mask = column < width
    if weight is not None:
        w = tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    delta_bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = begin + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & column_mask
        offsets = row.to(tl.int64)[:, None] * width + column
        x = tl.load(summed + offsets, mask=mask, other=0.0).to(tl.float32)
        y_gradient = tl.load(normed_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row, mask=row < rows, other=0.0)[:, None]
        if CENTRED:
            x -= tl.load(means + row, mask=row < rows, other=0.0)[:, None]
        x = tl.where(mask, x * rstd, 0.0)
        x_gradient = y_gradient
        if weight is not None:
            weight_sum += y_gradient * x
            x_gradient = y_gradient * w
        if BIASED:
            bias_sum += y_gradient
        x_gradient = norm_gradient(x_gradient, x, rstd, width, CENTRED)
        if summed_gradient is not None:
            x_gradient += tl.load(summed_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        x_gradient = store_gradients(
            x_gradient, gradient, delta_gradient, seed, offsets, mask, keep_scale, THRESHOLD
        )  # fmt: skip
        if DELTA_BIASED:
            delta_bias_sum += tl.where(mask, x_gradient, 0.0)
    if sums is not None:
        store_vector_sums(
            sums, program * width * VECTORS, weight_sum, bias_sum, delta_bias_sum, width,
            weight is not None, BIASED, DELTA_BIASED, COLUMNS,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AddConfig:
    """What a kernel that adds delta to the stream needs to know beside its tensors.

    `dropout` is that of delta plus its bias. `read_slot` belongs to the layer that reads the result, `delta_slot` to
    the layer that computed delta. A gradient of the stream that is `deferred` passes by autograd.
    """

    read_slot: GradientSlot | None = None
    delta_slot: GradientSlot | None = None
    dropout: DropoutUse = NO_DROPOUT
    deferred: DeferredGradient | None = None
    side: SideStream | None = field(default_factory=current_side_stream, init=False)

    def gradients(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Where the gradients of the stream and of delta are written: both in one tensor, unless there is dropout."""
        of_delta = torch.empty_like(stream) if self.delta_slot is None else self.delta_slot.gradient
        return torch.empty_like(of_delta) if self.dropout.probability else of_delta, of_delta


@dataclass(frozen=True)
class NormConfig(AddConfig):
    """How the sum is normalised, and where the gradients of vectors are summed, if the norm's kernel does that."""

    eps: float
    centred: bool
    sums: ColumnSums | None = None

    def outputs(self, summed: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Where normalised rows, their means (if the norm is centred) and inverse standard deviations are written."""
        normed = torch.empty_like(summed) if self.read_slot is None else self.read_slot.input
        rstds = torch.empty(len(summed), dtype=torch.float32, device=summed.device)
        return normed, torch.empty_like(rstds) if self.centred else None, rstds


class AddNorm(torch.autograd.Function):
    """stream, delta [rows, width] (or None), three vectors [width] (or None) -> the sum, and the sum normalised.

    Dropout applies to delta plus its bias. Without `weight` the norm has no weight and no bias.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, delta: Tensor | None, delta_bias: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, config: NormConfig,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        (rows, width), dropout = stream.shape, config.dropout
        outputs, tile = AddNorm.outputs(ctx, stream, delta, delta_bias, weight, bias, config), row_tile(width)
        _norm_forward[(triton.cdiv(rows, tile["ROWS"]),)](
            stream, delta, delta_bias, weight, bias, dropout.seed, *outputs, rows, width, config.eps,
            dropout.keep_scale, config.centred, dropout.threshold, **tile,
        )  # fmt: skip
        return outputs[:2]

    @staticmethod
    def outputs(ctx: Any, stream: Tensor, *inputs: Any) -> tuple[Any, ...]:
        """For the inputs of `forward`: the sum, the sum normalised, means and scales, yet to be written.

        What the backward pass needs is kept in `ctx`.
        """
        delta, delta_bias, weight, bias, config = inputs
        summed = stream if delta is None else torch.empty_like(stream)
        normed, means, rstds = config.outputs(summed)
        ctx.save_for_backward(summed, weight, means, rstds)
        ctx.config, ctx.adds = config, delta is not None
        ctx.biased, ctx.delta_biased = bias is not None, delta_bias is not None
        ctx.set_materialize_grads(False)
        return summed, normed, means, rstds

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, summed_gradient: Tensor | None, normed_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (summed, weight, means, rstds), config, dropout = ctx.saved_tensors, ctx.config, ctx.config.dropout
        rows, width = summed.shape
        summed_gradient = None if summed_gradient is None else summed_gradient.contiguous()
        gradient, delta_gradient = config.gradients(summed)
        tile = row_tile(width)
        needs_sums = weight is not None or ctx.delta_biased
        tiles = triton.cdiv(rows, tile["ROWS"] * (TILES_PER_PROGRAM if needs_sums else 1))
        programs = programs_for(summed.device, PROGRAMS_PER_SM, tiles) if needs_sums else tiles
        sums = config.sums.buffer(programs, VECTORS * width, summed.device) if needs_sums else None
        _norm_backward[(programs,)](
            normed_gradient.contiguous(), summed_gradient, summed, weight, means, rstds, dropout.seed, gradient,
            delta_gradient, sums, rows, width, dropout.keep_scale, config.centred, ctx.biased, ctx.delta_biased,
            dropout.threshold, VECTORS, **tile,
        )  # fmt: skip
        totals = config.sums.total().view(VECTORS, width).unbind() if needs_sums else (None,) * VECTORS
        used = (weight is not None, ctx.biased, ctx.delta_biased)
        of_weight, of_bias, of_delta_bias = (x if is_used else None for x, is_used in zip(totals, used, strict=True))
        return gradient, delta_gradient if ctx.adds else None, of_delta_bias, of_weight, of_bias, None


def plain_add_norm(
    stream: Tensor,
    delta: Tensor | None,
    delta_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """The reference, in torch's operations."""
    if delta is not None:
        stream = stream + (delta if delta_bias is None else delta + delta_bias)
    norm = F.layer_norm(stream, weight.shape, weight, bias, eps) if centred else None
    return stream, F.rms_norm(stream, weight.shape, weight, eps) if norm is None else norm


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
        ctx: Any, stream: Tensor, delta: Tensor, bias: Tensor | None, dropout: DropoutUse = NO_DROPOUT,
        slot: GradientSlot | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.side, ctx.dropout, ctx.slot = current_side_stream(), dropout, slot
        summed = torch.empty_like(stream)
        grid = (triton.cdiv(stream.numel(), ELEMENTS),)
        _add[grid](
            stream, delta, bias, dropout.seed, summed, stream.numel(), stream.shape[1], dropout.keep_scale,
            dropout.threshold, ELEMENTS, num_warps=4,
        )  # fmt: skip
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        bias_gradient, delta_gradient = None, gradient
        if ctx.dropout.probability:
            out = torch.empty_like(gradient) if ctx.slot is None else ctx.slot.gradient
            delta_gradient = dropout_into(gradient.contiguous(), ctx.dropout, out)
        if ctx.needs_input_grad[2]:
            with on_side(ctx.side, delta_gradient, priority=True):
                bias_gradient = delta_gradient.sum(0, dtype=torch.float32)
        return gradient, delta_gradient, bias_gradient, None, None


def plain_add(stream: Tensor, delta: Tensor, bias: Tensor | None) -> Tensor:
    """The reference, in torch's operations."""
    return stream + delta if bias is None else stream + delta + bias
