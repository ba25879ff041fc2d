"""Products of rows sorted by expert with one matrix per expert, forward and backward.

Gathering tokens, adding a bias, the activation and its derivative are fused into the products. Padding rows hold finite
numbers forward; backward they hold zeros, so that a sum over an expert's tiles is a sum over its rows.
"""

from functools import partial

import torch
from torch import Tensor

from braidlm.kernels.ops.activation import value_and_derivative
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse, apply_dropout
from braidlm.kernels.ops.launch import FLOAT32_BLOCKS, MIN_BLOCK, Blocks, fit_blocks, is_nvidia
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.permutation import Permutation

# The blocks were the fastest of twelve or more on an H200 for banks of 192-768, 384-768 and 384-248 channels, and of
# ten for banks of 1024-2048 channels and more. "Uneven" is what was measured at 248 channels: no multiple of a block.
LARGE = 1024
"""Channels from which on a program can hold a large block, and a product is long enough to fill the device with it."""
LARGE_BLOCKS = Blocks(128, 256, 64, 8, 4)
LARGE_BACKWARD_BLOCKS = Blocks(128, 128, 64, 8, 3)
"""With an activation's derivative, or sums, a program holds twice the elements."""
UNEVEN_BLOCKS = Blocks(128, 128, 64, 8, 3, 128)
UNEVEN_COMBINED_BLOCKS = Blocks(64, 64, 64, 4, 3, 128)


def product_blocks(columns: int, inner: int, dtype: torch.dtype, summed: bool = False) -> Blocks:
    if dtype == torch.float32:
        return FLOAT32_BLOCKS
    if _is_large(columns, inner):
        return LARGE_BACKWARD_BLOCKS if summed else LARGE_BLOCKS
    if not _fits(columns) or (summed and columns % 128 == 0):
        return Blocks(128, 64, 64, 4, 3)
    return UNEVEN_BLOCKS if inner % 64 and not summed else Blocks(64, 128, 64, 4, 3)


def activated_blocks(columns: int, inner: int, dtype: torch.dtype) -> Blocks:
    if dtype == torch.float32 or _is_large(columns, inner):
        return product_blocks(columns, inner, dtype)
    if not _fits(columns):
        return Blocks(128, 64, 64, 8, 3)
    return UNEVEN_BLOCKS if columns % 128 else Blocks(128, 128, 64, 8, 3)


def combined_blocks(columns: int, inner: int, dtype: torch.dtype, gated: bool) -> Blocks:
    if dtype == torch.float32 or gated or columns % 128 == 0 or not _fits(columns):
        return product_blocks(columns, inner, dtype, summed=True)
    return UNEVEN_COMBINED_BLOCKS


def _is_large(columns: int, inner: int) -> bool:
    return min(columns, inner) >= LARGE and columns % LARGE_BLOCKS.columns == 0


def _fits(columns: int) -> bool:
    """Whether blocks of 128 columns waste little of their last one."""
    return triton.cdiv(columns, 128) * 128 <= 1.1 * columns


@triton.jit
def products(  # type: ignore[no-untyped-def]
    left, right, column, INNER: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, SECOND_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """left [M, INNER] @ right, and, unless SECOND_OFFSET is 0, left @ the matrix that begins there after right."""
    EVEN_INNER: tl.constexpr = INNER % BLOCK_K == 0
    EVEN: tl.constexpr = EVEN_INNER and (COLUMNS % BLOCK_N == 0)
    at = tl.arange(0, BLOCK_K)
    one = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    two = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, INNER, BLOCK_K):
        inner_mask = begin + at < INNER
        mask = inner_mask[:, None] & (column < COLUMNS)[None, :]
        a = tl.load(left) if EVEN_INNER else tl.load(left, mask=inner_mask[None, :], other=0.0)
        b = tl.load(right) if EVEN else tl.load(right, mask=mask, other=0.0)
        one = tl.dot(a, b, one, input_precision="ieee")
        if SECOND_OFFSET:
            b = tl.load(right + SECOND_OFFSET) if EVEN else tl.load(right + SECOND_OFFSET, mask=mask, other=0.0)
            two = tl.dot(a, b, two, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K * STRIDE
    return one, two


@triton.jit
def _grouped_forward(  # type: ignore[no-untyped-def]
    rows, weight, bias, base, seed, out, value, source, tile_expert, keep_scale,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, GATHER: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    THRESHOLD: tl.constexpr, FAST: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`out` is the product with its bias (None where only its activation is read), `value` its activation; COLUMNS are
    those of `value` if it is gated. Dropout is of the activation, or, without one, of the product."""
    WIDTH: tl.constexpr = COLUMNS * (2 if GATED else 1)
    programs = tl.cdiv(COLUMNS, BLOCK_N)  # of one tile of rows; they are neighbours, so that its rows stay in the cache
    block = tl.program_id(0) // programs
    expert = tl.load(tile_expert + block * BLOCK_M // TILE)
    if expert < 0:
        return
    first = block.to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % programs * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    if GATHER:
        token = tl.maximum(tl.load(source + first + row), 0)  # padding reads the first token, which is finite
        left = rows + token.to(tl.int64)[:, None] * INNER + at[None, :]
    else:
        left = rows + first * INNER + row[:, None] * INNER + at[None, :]
    right = weight + expert.to(tl.int64) * INNER * WIDTH + at[:, None] * WIDTH + column[None, :]
    SECOND_OFFSET: tl.constexpr = COLUMNS if GATED else 0
    total, up = products(left, right, column, INNER, COLUMNS, WIDTH, SECOND_OFFSET, BLOCK_M, BLOCK_N, BLOCK_K)

    column_mask = column < COLUMNS
    mask = tl.broadcast_to(column_mask[None, :], [BLOCK_M, BLOCK_N])
    if bias is not None:
        bias += expert * WIDTH + column
        total += tl.load(bias, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    offsets = row[:, None] * WIDTH + column[None, :]
    if KIND is None:
        total = apply_dropout(total, seed, first * WIDTH + offsets, keep_scale, THRESHOLD)
    if base is not None:
        total += tl.load(base + first * WIDTH + offsets, mask=mask, other=0.0).to(tl.float32)
    if out is not None:
        out += first * WIDTH
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)
    if KIND is not None:
        activated, _ = value_and_derivative(total, KIND, FAST)
        if GATED:
            if bias is not None:
                up += tl.load(bias + COLUMNS, mask=column_mask, other=0.0).to(tl.float32)[None, :]
            if out is not None:
                tl.store(out + offsets + COLUMNS, up.to(out.dtype.element_ty), mask=mask)
            activated *= up
        offsets = row[:, None] * COLUMNS + column[None, :]
        activated = apply_dropout(activated, seed, first * COLUMNS + offsets, keep_scale, THRESHOLD)
        tl.store(value + first * COLUMNS + offsets, activated.to(value.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_backward(  # type: ignore[no-untyped-def]
    gradient, weight, inner, seed, out, sums, source, row_weights, projections, weighted, tile_expert, rows, keep_scale,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, FAST: tl.constexpr,
    THRESHOLD: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """gradient [R, INNER] through the weight [E, COLUMNS, INNER], and through an activation if there is one.

    The result is also summed over each program's rows, for the bias of the layer before. With `row_weights` the
    gradient is of tokens' weighted sums of rows: it is gathered, each row has its weight, and the rows' projections on
    it, which are the weights' gradients, are summed over each program's columns; `weighted` is the activation's value
    times the weight, with which the gathered gradient makes the gradient of the matrix.
    """
    WIDTH: tl.constexpr = COLUMNS * (2 if GATED else 1)
    programs = tl.cdiv(COLUMNS, BLOCK_N)
    block = tl.program_id(0) // programs
    expert = tl.load(tile_expert + block * BLOCK_M // TILE)
    if expert < 0:
        return
    first = block.to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % programs * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    if row_weights is not None:
        token = tl.load(source + first + row)
        row_weight = tl.load(row_weights + first + row, mask=token >= 0, other=0.0)  # padding gets zeros
        left = gradient + tl.maximum(token, 0).to(tl.int64)[:, None] * INNER + at[None, :]
    else:
        left = gradient + first * INNER + row[:, None] * INNER + at[None, :]
    right = weight + expert.to(tl.int64) * INNER * COLUMNS + column[None, :] * INNER + at[:, None]
    mask = tl.broadcast_to((column < COLUMNS)[None, :], [BLOCK_M, BLOCK_N])
    offsets = row[:, None] * WIDTH + column[None, :]
    if KIND is not None:  # loaded before the product, so that it is there after it
        inner += first * WIDTH
        x = tl.load(inner + offsets, mask=mask, other=0.0)
        if GATED:
            up = tl.load(inner + offsets + COLUMNS, mask=mask, other=0.0)
    total, _ = products(left, right, column, INNER, COLUMNS, 1, 0, BLOCK_M, BLOCK_N, BLOCK_K)

    out += first * WIDTH
    if KIND is not None:
        value, derivative = value_and_derivative(x.to(tl.float32), KIND, FAST)
        narrow_offsets = first * COLUMNS + row[:, None] * COLUMNS + column[None, :]
        total = apply_dropout(total, seed, narrow_offsets, keep_scale, THRESHOLD)
        if row_weights is not None:
            activated = value * up.to(tl.float32) if GATED else value
            projection = tl.sum(tl.where(mask, total * activated, 0.0), 1)
            tl.store(projections + tl.program_id(0) % programs * rows + first + row, projection)
            activated = apply_dropout(activated * row_weight[:, None], seed, narrow_offsets, keep_scale, THRESHOLD)
            tl.store(weighted + narrow_offsets, activated.to(weighted.dtype.element_ty), mask=mask)
            total *= row_weight[:, None]
        if GATED:
            other = total * value
            tl.store(out + offsets + COLUMNS, other.to(out.dtype.element_ty), mask=mask)
            if sums is not None:
                tl.store(sums + block * WIDTH + COLUMNS + column, tl.sum(other, 0), mask=column < COLUMNS)
            derivative *= up.to(tl.float32)
        total *= derivative
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)
    if sums is not None:
        tl.store(sums + block * WIDTH + column, tl.sum(total, 0), mask=column < COLUMNS)


def grouped_forward(
    rows: Tensor,
    weight: Tensor,
    permutation: Permutation,
    bias: Tensor | None = None,
    gather: bool = False,
    activation: str | None = None,
    gated: bool = False,
    blocks: Blocks | None = None,
    base: Tensor | None = None,
    dropout: DropoutUse = NO_DROPOUT,
    value: Tensor | None = None,
    keep_inner: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """rows [R, in], or tokens [N, in] to be gathered, through weight [E, in, out] -> [R, out] and None.

    With an activation: its value [R, out], or [R, out / 2] if it is gated, after dropout, and its input [R, out].
    Without one, the product may be added to `base` [R, out] after dropout. `value` is the buffer for an activation's
    value. Its input is None unless it is kept for the backward pass.
    """
    experts, inputs, outputs = weight.shape
    assert experts == permutation.experts
    assert rows.shape == (len(permutation.row_of_choice) if gather else permutation.rows, inputs)
    assert weight.is_contiguous()
    columns, rule = outputs // 2 if gated else outputs, product_blocks if activation is None else activated_blocks
    blocks = blocks or rule(outputs, inputs, rows.dtype)
    m, n, k = fit_blocks(blocks, permutation.tile, columns, inputs)
    n = max(MIN_BLOCK, n // 2) if gated else n  # a program computes two products
    out = rows.new_empty(permutation.rows, outputs) if activation is None or keep_inner else None
    if activation is not None and value is None:
        value = rows.new_empty(permutation.rows, columns)
    _grouped_forward[(permutation.rows // m * triton.cdiv(columns, n),)](
        rows.contiguous(), weight, bias, base, dropout.seed, out, value, permutation.source, permutation.tile_expert,
        dropout.keep_scale, inputs, columns, gather, activation, gated, dropout.threshold, is_nvidia(rows),
        permutation.tile, m, n, k, **blocks.launch,
    )  # fmt: skip
    return (out, None) if value is None else (value, out)  # type: ignore[return-value]


def grouped_backward(
    gradient: Tensor,
    weight: Tensor,
    permutation: Permutation,
    inner: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    blocks: Blocks | None = None,
    out: Tensor | None = None,
    summed: bool = False,
    dropout: DropoutUse = NO_DROPOUT,
    row_weights: Tensor | None = None,
    weighted: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """gradient [R, out] through weight [E, in, out] -> [R, in], in the buffer `out` if there is one, and two sums.

    With the `inner` of an activation whose value the layer reads, after dropout: the gradient of inner, as wide as
    inner. If `summed`, also its sums over blocks of rows, float32 [blocks, width], of used tiles only.

    With `row_weights` [R] the gradient is [N, out], that of tokens' sums of rows times their weights. Then there are
    also the projections of the rows on it, without the layer's bias: float32 [parts, R], to be added up. `weighted`
    [R, in] gets the activation's value times the weight.
    """
    experts, columns, outputs = weight.shape
    assert experts == permutation.experts
    assert gradient.shape == (permutation.rows if row_weights is None else len(permutation.row_of_choice), outputs)
    assert weight.is_contiguous()
    assert (inner is None) == (activation is None)
    if blocks is None and row_weights is not None:
        blocks = combined_blocks(columns, outputs, gradient.dtype, gated)
    blocks = blocks or product_blocks(columns, outputs, gradient.dtype, summed or activation is not None)
    m, n, k = fit_blocks(blocks, permutation.tile, columns, outputs)
    n = max(MIN_BLOCK, n // 2) if gated else n  # a program holds twice the elements
    parts = triton.cdiv(columns, n)
    out = gradient.new_empty(permutation.rows, columns * 2 if gated else columns) if out is None else out
    floats = partial(torch.empty, dtype=torch.float32, device=gradient.device)
    sums = floats(permutation.rows // m, out.shape[1]) if summed else None
    projections = None if row_weights is None else floats(parts, permutation.rows)
    _grouped_backward[(permutation.rows // m * parts,)](
        gradient.contiguous(), weight, inner, dropout.seed, out, sums, permutation.source, row_weights, projections,
        weighted, permutation.tile_expert, permutation.rows, dropout.keep_scale,
        outputs, columns, activation, gated, is_nvidia(gradient), dropout.threshold, permutation.tile, m, n, k,
        **blocks.launch,
    )  # fmt: skip
    return out, sums, projections


def plain_grouped(
    rows: Tensor, weight: Tensor, permutation: Permutation, bias: Tensor | None = None, gather: bool = False
) -> Tensor:
    """The reference of a product: every expert on every row, and each row selects its own."""
    rows = rows[permutation.source.clamp_min(0).long()] if gather else rows
    owner = permutation.tile_expert.repeat_interleave(permutation.tile)
    out = rows.new_zeros(permutation.rows, weight.shape[2])
    for expert in range(len(weight)):
        own = rows @ weight[expert]
        own = own if bias is None else own + bias[expert]
        out = torch.where((owner == expert)[:, None], own, out)
    return out
