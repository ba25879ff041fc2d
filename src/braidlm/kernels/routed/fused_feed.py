"""Small feed-forward experts: both products of a tile of rows by one program, forward and backward.

Between the products, what the activation makes of a row stays in registers. So this is for experts whose inner rows a
program can hold; the products of wider ones are in `grouped_products`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from braidlm.kernels.ops.activation import value_and_derivative
from braidlm.kernels.ops.launch import is_nvidia
from braidlm.kernels.routed.grouped_products import FLOAT32_BLOCKS, MIN_BLOCK, Blocks, fit_blocks, products
from braidlm.kernels.routed.permutation import Permutation

MAX_COLUMNS = 256
"""Inner columns that a program can hold for 128 rows, or, in two products of a gated feed-forward part, for 64."""
BLOCKS, GATED_BLOCKS = Blocks(128, 64, 64, 8, 3), Blocks(64, 64, 32, 8, 3)
"""`columns` are those of the second product, `inner` those of the first."""


@triton.jit
def _fused_forward(  # type: ignore[no-untyped-def]
    tokens, up, up_bias, out_weight, out_bias, inner, rows, source, tile_expert,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    FAST: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`inner` is the input of the activation, kept for the backward pass if it is not None."""
    WIDTH: tl.constexpr = COLUMNS * (2 if GATED else 1)
    expert = tl.load(tile_expert + tl.program_id(0) * BLOCK_M // TILE)
    if expert < 0:
        return
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_C)
    at = tl.arange(0, BLOCK_K)
    token = tl.maximum(tl.load(source + first + row), 0)  # padding reads the first token, which is finite
    left = tokens + token.to(tl.int64)[:, None] * INPUTS + at[None, :]
    right = up + expert.to(tl.int64) * INPUTS * WIDTH + at[:, None] * WIDTH + column[None, :]
    SECOND_OFFSET: tl.constexpr = COLUMNS if GATED else 0
    total, other = products(left, right, column, INPUTS, COLUMNS, WIDTH, SECOND_OFFSET, BLOCK_M, BLOCK_C, BLOCK_K)

    column_mask = column < COLUMNS
    mask = tl.broadcast_to(column_mask[None, :], [BLOCK_M, BLOCK_C])
    offsets = row[:, None] * WIDTH + column[None, :]
    if up_bias is not None:
        up_bias += expert * WIDTH + column
        total += tl.load(up_bias, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if inner is not None:
        inner += first * WIDTH
        tl.store(inner + offsets, total.to(inner.dtype.element_ty), mask=mask)
    activated, _ = value_and_derivative(total, KIND, FAST)
    if GATED:
        if up_bias is not None:
            other += tl.load(up_bias + COLUMNS, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if inner is not None:
            tl.store(inner + offsets + COLUMNS, other.to(inner.dtype.element_ty), mask=mask)
        activated *= other
    value = tl.where(mask, activated, 0.0).to(rows.dtype.element_ty)
    rows += first * OUTPUTS
    out_weight += expert.to(tl.int64) * COLUMNS * OUTPUTS
    for begin in range(0, OUTPUTS, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        n_mask = n < OUTPUTS
        weight_mask = column_mask[:, None] & n_mask[None, :]
        w = tl.load(out_weight + column[:, None] * OUTPUTS + n[None, :], mask=weight_mask, other=0.0)
        y = tl.dot(value, w, input_precision="ieee")
        if out_bias is not None:
            y += tl.load(out_bias + expert * OUTPUTS + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        y_mask = tl.broadcast_to(n_mask[None, :], [BLOCK_M, BLOCK_N])
        tl.store(rows + row[:, None] * OUTPUTS + n[None, :], y.to(rows.dtype.element_ty), mask=y_mask)


@triton.jit
def _fused_backward(  # type: ignore[no-untyped-def]
    gradient, row_weights, out_weight, up, inner, inner_gradient, weighted, sums, projections, rows_gradient, source,
    tile_expert,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    FAST: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `_grouped_backward` with `row_weights`; then on to the gradient of rows, unless that is None."""
    WIDTH: tl.constexpr = COLUMNS * (2 if GATED else 1)
    block = tl.program_id(0)
    expert = tl.load(tile_expert + block * BLOCK_M // TILE)
    if expert < 0:
        return
    first = block.to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_C)
    at = tl.arange(0, BLOCK_K)
    token = tl.load(source + first + row)
    row_weight = tl.load(row_weights + first + row, mask=token >= 0, other=0.0)[:, None]  # padding gets zeros
    left = gradient + tl.maximum(token, 0).to(tl.int64)[:, None] * OUTPUTS + at[None, :]
    right = out_weight + expert.to(tl.int64) * COLUMNS * OUTPUTS + column[None, :] * OUTPUTS + at[:, None]
    total, _ = products(left, right, column, OUTPUTS, COLUMNS, 1, 0, BLOCK_M, BLOCK_C, BLOCK_K)

    column_mask = column < COLUMNS
    mask = tl.broadcast_to(column_mask[None, :], [BLOCK_M, BLOCK_C])
    offsets = row[:, None] * WIDTH + column[None, :]
    inner += first * WIDTH
    value, derivative = value_and_derivative(tl.load(inner + offsets, mask=mask, other=0.0).to(tl.float32), KIND, FAST)
    activated = value
    if GATED:
        other = tl.load(inner + offsets + COLUMNS, mask=mask, other=0.0).to(tl.float32)
        activated = value * other
        derivative *= other
    tl.store(projections + first + row, tl.sum(tl.where(mask, total * activated, 0.0), 1))
    narrow_offsets = first * COLUMNS + row[:, None] * COLUMNS + column[None, :]
    tl.store(weighted + narrow_offsets, (activated * row_weight).to(weighted.dtype.element_ty), mask=mask)
    total = tl.where(mask, total * row_weight, 0.0)
    inner_gradient += first * WIDTH
    if sums is not None:
        sums += block * WIDTH + column
    if GATED:
        second = total * value
        d_other = second.to(inner_gradient.dtype.element_ty)
        tl.store(inner_gradient + offsets + COLUMNS, d_other, mask=mask)
        if sums is not None:
            tl.store(sums + COLUMNS, tl.sum(second, 0), mask=column_mask)
    total *= derivative
    d_inner = total.to(inner_gradient.dtype.element_ty)
    tl.store(inner_gradient + offsets, d_inner, mask=mask)
    if sums is not None:
        tl.store(sums, tl.sum(total, 0), mask=column_mask)
    if rows_gradient is not None:
        rows_gradient += first * INPUTS
        up += expert.to(tl.int64) * INPUTS * WIDTH
        for begin in range(0, INPUTS, BLOCK_N):
            n = begin + tl.arange(0, BLOCK_N)
            n_mask = n < INPUTS
            weight_offsets = n[None, :] * WIDTH + column[:, None]
            weight_mask = column_mask[:, None] & n_mask[None, :]
            w = tl.load(up + weight_offsets, mask=weight_mask, other=0.0)
            dx = tl.dot(d_inner, w, input_precision="ieee")
            if GATED:
                w = tl.load(up + weight_offsets + COLUMNS, mask=weight_mask, other=0.0)
                dx = tl.dot(d_other, w, dx, input_precision="ieee")
            dx_mask = tl.broadcast_to(n_mask[None, :], [BLOCK_M, BLOCK_N])
            offset = row[:, None] * INPUTS + n[None, :]
            tl.store(rows_gradient + offset, dx.to(rows_gradient.dtype.element_ty), mask=dx_mask)


def is_fused(out_weight: Tensor) -> bool:
    """Whether experts with these last matrices [E, hidden, out] are small enough."""
    return out_weight.shape[1] <= MAX_COLUMNS


def fused_forward(
    tokens: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    permutation: Permutation,
    activation: str,
    gated: bool,
    keep_inner: bool = True,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """tokens [N, in] through the experts of their rows -> [R, out], and, if it is kept, the activation's input."""
    (_, inputs, width), (_, columns, outputs) = up.shape, out_weight.shape
    rows = tokens.new_empty(permutation.rows, outputs)
    inner = tokens.new_empty(permutation.rows, width) if keep_inner else None
    blocks = blocks or _blocks(tokens, gated)
    m, n, k = fit_blocks(blocks, permutation.tile, outputs, inputs)
    _fused_forward[(permutation.rows // m,)](
        tokens.contiguous(), up, up_bias, out_weight, out_bias, inner, rows, permutation.source,
        permutation.tile_expert, inputs, columns, outputs, activation, gated, is_nvidia(tokens), permutation.tile,
        m, _padded(columns), n, k, **blocks.launch,
    )  # fmt: skip
    return rows, inner


def fused_backward(
    gradient: Tensor,
    row_weights: Tensor,
    out_weight: Tensor,
    up: Tensor,
    permutation: Permutation,
    inner: Tensor,
    activation: str,
    gated: bool,
    weighted: Tensor,
    inner_gradient: Tensor,
    needs_sums: bool,
    needs_rows: bool,
    blocks: Blocks | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """As `combined_backward`: sums and projections; and the gradient [R, in] of rows, if it is needed."""
    (_, inputs, width), (_, columns, outputs) = up.shape, out_weight.shape
    blocks = blocks or _blocks(gradient, gated)
    m, n, k = fit_blocks(blocks, permutation.tile, inputs, outputs)
    programs = permutation.rows // m
    sums = gradient.new_empty(programs, width, dtype=torch.float32) if needs_sums else None
    projections = gradient.new_empty(1, permutation.rows, dtype=torch.float32)
    rows_gradient = gradient.new_empty(permutation.rows, inputs) if needs_rows else None
    _fused_backward[(programs,)](
        gradient.contiguous(), row_weights, out_weight, up, inner, inner_gradient, weighted, sums, projections,
        rows_gradient, permutation.source, permutation.tile_expert, inputs, columns, outputs, activation, gated,
        is_nvidia(gradient), permutation.tile, m, _padded(columns), n, k, **blocks.launch,
    )  # fmt: skip
    return sums, projections, rows_gradient


def _padded(columns: int) -> int:
    return max(MIN_BLOCK, triton.next_power_of_2(columns))


def _blocks(rows: Tensor, gated: bool) -> Blocks:
    if rows.dtype == torch.float32:
        return FLOAT32_BLOCKS
    return GATED_BLOCKS if gated else BLOCKS
