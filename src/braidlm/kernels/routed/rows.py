"""Adding a block's output to its tokens' rows and normalising them: one pass over memory forward and one backward.

Rows are sorted by block, and each starts as its token's stream. The norm has no weight here: it is folded into the next
product (`ops.fold`). Rows so narrow that a program holds whole ones are also projected by the forward kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.dropout import apply_dropout
from braidlm.kernels.ops.launch import Blocks, fit_blocks
from braidlm.kernels.ops.norm import NormConfig
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.combine import WARPS, block_shape, combine
from braidlm.kernels.routed.grouped.layers import check_slot, gradient_of_rows, parameter_gradients
from braidlm.kernels.routed.grouped.products import products
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.side_stream import on_side

MAX_WIDTH = 256
"""Columns of a row that a program can hold together with its product."""
BLOCKS = {torch.bfloat16: Blocks(64, MAX_WIDTH, 32, 4, 3), torch.float32: Blocks(32, MAX_WIDTH, 32, 8, 2)}
"""The first is the fastest of nine on an H200 for 192 columns."""


@triton.jit
def _store_normed(  # type: ignore[no-untyped-def]
    x, mask, row, offsets, column, summed, normed, means, rstds, eps, WIDTH: tl.constexpr, CENTRED: tl.constexpr
):
    """Store rows [ROWS, COLUMNS] and the same normalised; padding rows become zeros."""
    rounded = tl.where(mask, x, 0.0).to(summed.dtype.element_ty)
    tl.store(summed + offsets, rounded, mask=column < WIDTH)
    x = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / WIDTH
        tl.store(means + row, mean)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
    tl.store(rstds + row, rstd)
    tl.store(normed + offsets, (x * rstd[:, None]).to(normed.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _rows_forward(  # type: ignore[no-untyped-def]
    stream, delta, source, tile_expert, seed, summed, normed, means, rstds, eps, keep_scale,
    WIDTH: tl.constexpr, CENTRED: tl.constexpr, THRESHOLD: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(tile_expert + program * ROWS // TILE) < 0:
        return
    row = program * ROWS + tl.arange(0, ROWS)
    token = tl.load(source + row)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (token >= 0)[:, None] & (column < WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(stream + token.to(tl.int64)[:, None] * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
    y = apply_dropout(y, seed, offsets, keep_scale, THRESHOLD)
    _store_normed(x + y, mask, row, offsets, column, summed, normed, means, rstds, eps, WIDTH, CENTRED)


@triton.jit
def _project_add_norm(  # type: ignore[no-untyped-def]
    rows, weight, bias, stream, source, tile_expert, seed, summed, normed, means, rstds, eps, keep_scale,
    INNER: tl.constexpr, WIDTH: tl.constexpr, CENTRED: tl.constexpr, THRESHOLD: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(tile_expert + block * BLOCK_M // TILE)
    if expert < 0:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, COLUMNS)
    inner = tl.arange(0, BLOCK_K)
    token = tl.load(source + row)
    column_mask = (column < WIDTH)[None, :]
    mask = (token >= 0)[:, None] & column_mask
    x = tl.load(stream + token.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    left = rows + row.to(tl.int64)[:, None] * INNER + inner[None, :]
    right = weight + expert.to(tl.int64) * INNER * WIDTH + inner[:, None] * WIDTH + column[None, :]
    y, _ = products(left, right, column, INNER, WIDTH, WIDTH, 0, BLOCK_M, COLUMNS, BLOCK_K)
    if bias is not None:
        y += tl.load(bias + expert * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    offsets = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    x = x.to(tl.float32) + apply_dropout(y, seed, offsets, keep_scale, THRESHOLD)
    _store_normed(x, mask, row, offsets, column[None, :], summed, normed, means, rstds, eps, WIDTH, CENTRED)


@triton.jit
def _rows_backward(  # type: ignore[no-untyped-def]
    normed_gradient, summed_gradient, summed, source, tile_expert, seed, means, rstds, gradient, delta_gradient,
    keep_scale,
    WIDTH: tl.constexpr, CENTRED: tl.constexpr, THRESHOLD: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(tile_expert + program * ROWS // TILE) < 0:
        return
    row = program * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (tl.load(source + row) >= 0)[:, None] & (column < WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(summed + offsets, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(normed_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstds + row)[:, None]
    if CENTRED:
        x -= tl.load(means + row)[:, None]
    x = tl.where(mask, x * rstd, 0.0)
    projection = tl.sum(dy * x, 1)[:, None] / WIDTH
    dx = dy - x * projection
    if CENTRED:
        dx -= tl.sum(dy, 1)[:, None] / WIDTH
    dx *= rstd
    if summed_gradient is not None:
        dx += tl.load(summed_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    dx = tl.where(mask, dx, 0.0)
    tl.store(gradient + offsets, dx.to(gradient.dtype.element_ty), mask=column < WIDTH)
    if THRESHOLD:
        dx = apply_dropout(dx, seed, offsets, keep_scale, THRESHOLD)
        tl.store(delta_gradient + offsets, dx.to(delta_gradient.dtype.element_ty), mask=column < WIDTH)


def _outputs(ctx: Any, stream: Tensor, permutation: Permutation, norm: NormConfig, *saved: Tensor) -> tuple[Any, ...]:
    """Empty tensors for summed rows [R, width], the same normalised, their means [R] or None, and inverse standard
    deviations [R]; all but the second are kept for the backward pass, behind what else is `saved`."""
    summed = stream.new_empty(permutation.rows, stream.shape[1])
    normed, means, rstds = norm.outputs(summed)
    ctx.save_for_backward(*saved, summed, means, rstds)
    ctx.permutation, ctx.norm = permutation, norm
    ctx.set_materialize_grads(False)
    return summed, normed, means, rstds


class AddNormRows(torch.autograd.Function):
    """stream [N, width], delta [R, width] -> each row's token plus delta after dropout, and that normalised, [R,
    width].

    Upstream gradients are zero in padding rows, and so are the results. With `norm.deferred`, the gradient of the
    stream is computed on the side stream and written there.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, delta: Tensor, permutation: Permutation, norm: NormConfig
    ) -> tuple[Tensor, Tensor]:
        outputs, width, dropout = _outputs(ctx, stream, permutation, norm), stream.shape[1], norm.dropout
        tile = _tile(width, permutation)
        _rows_forward[(permutation.rows // tile["ROWS"],)](
            stream, delta, permutation.source, permutation.tile_expert, dropout.seed, *outputs, norm.eps,
            dropout.keep_scale, width, norm.centred, dropout.threshold, permutation.tile, **tile,
        )  # fmt: skip
        return outputs[:2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, summed_gradient: Tensor | None, normed_gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, ctx.saved_tensors, summed_gradient, normed_gradient), None, None


class ProjectAddNormRows(torch.autograd.Function):
    """rows [R, in], weight [E, in, width], its cast, a bias [E, width] or None, stream [N, width] -> `AddNormRows` of
    the stream and of the rows' projections as `GroupedLinear` computes them. Width is at most `MAX_WIDTH`.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, cast: Tensor, bias: Tensor | None, stream: Tensor,
        permutation: Permutation, norm: NormConfig,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        check_slot(norm.delta_slot, rows)
        experts, inputs, width = weight.shape
        assert experts == permutation.experts
        assert rows.shape == (permutation.rows, inputs)
        assert width <= MAX_WIDTH
        outputs, blocks = _outputs(ctx, stream, permutation, norm, rows, cast), BLOCKS[rows.dtype]
        m, n, k = fit_blocks(blocks, permutation.tile, width, inputs)
        _project_add_norm[(permutation.rows // m,)](
            rows.contiguous(), cast, bias, stream, permutation.source, permutation.tile_expert, norm.dropout.seed,
            *outputs, norm.eps, norm.dropout.keep_scale, inputs, width, norm.centred, norm.dropout.threshold,
            permutation.tile, m, n, k, **blocks.launch,
        )  # fmt: skip
        return outputs[:2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, summed_gradient: Tensor | None, normed_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, cast, *saved), permutation, norm = ctx.saved_tensors, ctx.permutation, ctx.norm
        needs_rows, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        stream_gradient, gradient = _gradients(ctx, saved, summed_gradient, normed_gradient)
        weight_gradient = bias_gradient = None
        if needs_weight or needs_bias:
            weight_gradient, bias_gradient = parameter_gradients(
                norm.side, norm.delta_slot, rows, gradient, permutation, None, needs_bias
            )
        rows_gradient = gradient_of_rows(gradient, cast, permutation, False) if needs_rows else None
        return rows_gradient, weight_gradient, None, bias_gradient, stream_gradient, None, None


def _gradients(
    ctx: Any, saved: Sequence[Any], summed_gradient: Tensor | None, normed_gradient: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Gradients of the stream (None if deferred) and of what was added."""
    permutation, norm, (summed, means, rstds) = ctx.permutation, ctx.norm, saved
    width, dropout = summed.shape[1], norm.dropout
    gradient, delta_gradient = norm.gradients(summed)
    summed_gradient = None if summed_gradient is None else summed_gradient.contiguous()
    tile = _tile(width, permutation)
    _rows_backward[(permutation.rows // tile["ROWS"],)](
        normed_gradient.contiguous(), summed_gradient, summed, permutation.source, permutation.tile_expert,
        dropout.seed, means, rstds, gradient, delta_gradient, dropout.keep_scale,
        width, norm.centred, dropout.threshold, permutation.tile, **tile,
    )  # fmt: skip
    if norm.deferred is None:
        return combine(gradient, None, permutation), delta_gradient
    with on_side(norm.side, gradient, priority=True):
        deferred = combine(gradient, None, permutation)
    norm.deferred.write(deferred, norm.side)
    return None, delta_gradient


def _tile(width: int, permutation: Permutation) -> dict[str, int]:
    columns, rows = block_shape(width)
    return {"ROWS": min(permutation.tile, rows), "COLUMNS": columns, "num_warps": WARPS}


def plain_add_norm_rows(
    stream: Tensor, delta: Tensor, permutation: Permutation, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """The reference, in torch's operations."""
    real = (permutation.source >= 0)[:, None]
    summed = torch.where(real, stream[permutation.source.clamp_min(0).long()] + delta, 0.0)
    shape = summed.shape[1:]
    return summed, F.layer_norm(summed, shape, eps=eps) if centred else F.rms_norm(summed, shape, eps=eps)
