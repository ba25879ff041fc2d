"""`GroupedLinear` and then `AddNormRows` in one forward kernel, for rows so narrow that a program holds whole ones."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.dropout import keep_mask, threshold
from braidlm.kernels.ops.launch import Blocks, fit_blocks
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.grouped.layers import check_slot, gradient_of_rows, parameter_gradients
from braidlm.kernels.routed.grouped.products import products
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.routed.rows import Norm, Normed, rows_gradients, store_normed
from braidlm.kernels.side_stream import use_side_stream

MAX_WIDTH = 256
"""Columns of a row that a program can hold together with its product."""
BLOCKS = {torch.bfloat16: Blocks(64, MAX_WIDTH, 32, 4, 3), torch.float32: Blocks(32, MAX_WIDTH, 32, 8, 2)}
"""The first is the fastest of nine on an H200 for 192 columns."""


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
    if THRESHOLD:
        y = tl.where(keep_mask(seed, offsets, THRESHOLD), y * keep_scale, 0.0)
    store_normed(
        x.to(tl.float32) + y, mask, row, offsets, column[None, :], summed, normed, means, rstds, eps, WIDTH, CENTRED
    )


class ProjectAddNormRows(torch.autograd.Function):
    """rows [R, in], weight [E, in, width], its cast, a bias [E, width] or None, stream [N, width] -> each row's token
    plus the projection of the row after dropout, and that normalised, [R, width]. Width is at most `MAX_WIDTH`.

    Upstream gradients are zero in padding rows, and so are the results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        cast: Tensor,
        bias: Tensor | None,
        stream: Tensor,
        permutation: Permutation,
        norm: Norm,
    ) -> tuple[Tensor, Tensor]:
        check_slot(norm.delta_slot, rows)
        experts, inputs, width = weight.shape
        assert experts == permutation.experts
        assert rows.shape == (permutation.rows, inputs)
        assert width <= MAX_WIDTH
        outputs, blocks = Normed.empty(stream, permutation, norm), BLOCKS[rows.dtype]
        m, n, k = fit_blocks(blocks, permutation.tile, width, inputs)
        _project_add_norm[(permutation.rows // m,)](
            rows.contiguous(), cast, bias, stream, permutation.source, permutation.tile_expert, norm.seed, *outputs,
            norm.eps, norm.keep_scale, inputs, width, norm.centred, threshold(norm.dropout), permutation.tile, m, n, k,
            **blocks.launch,
        )  # fmt: skip
        ctx.save_for_backward(rows, cast, outputs.summed, outputs.means, outputs.rstds)
        ctx.permutation, ctx.norm = permutation, norm
        ctx.set_materialize_grads(False)
        return outputs.summed, outputs.rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, summed_gradient: Tensor | None, normed_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, cast, *saved), permutation = ctx.saved_tensors, ctx.permutation
        needs_rows, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        stream_gradient, gradient = rows_gradients(summed_gradient, normed_gradient, saved, permutation, ctx.norm)
        weight_gradient = bias_gradient = None
        if needs_weight or needs_bias:
            with use_side_stream(ctx.norm.side):
                weight_gradient, bias_gradient = parameter_gradients(
                    ctx.norm.delta_slot, rows, gradient, permutation, False, needs_bias
                )
        rows_gradient = gradient_of_rows(gradient, cast, permutation, False) if needs_rows else None
        return rows_gradient, weight_gradient, None, bias_gradient, stream_gradient, None, None
