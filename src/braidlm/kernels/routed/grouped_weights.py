"""Gradients of the matrices and biases of experts: sums over rows sorted by expert, of one layer or of several.

These sums are long, and limited by how often rows are read again: the larger the blocks, the less. Widths of small
models are often three times a power of two, which no block is; so a program may hold up to three adjacent blocks, which
share what they read of the wider side.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from braidlm.kernels.ops.launch import multiprocessors
from braidlm.kernels.routed.grouped_products import FLOAT32_BLOCKS, LARGE, Blocks, fit_blocks
from braidlm.kernels.routed.permutation import Permutation

PROGRAMS_PER_SM, MIN_STEPS = 1, 4
"""Programs that fill the device, and blocks of rows that a program should sum at least."""
SPLIT_ELEMENTS = 2048
"""Elements of a block where the splits of a sum are added up."""
COLUMNS = 64
"""Columns of a bias that a program sums over a tile of rows."""
SUM_ROWS, SUM_COLUMNS = 64, 32
"""A block of such sums where they are added up by expert."""


@dataclass(frozen=True)
class WeightLayout:
    """The part of a weight gradient that a program computes: `parts` adjacent blocks, whose `inner` counts sorted rows.

    The rows of blocks are inputs of the layer, or, `transposed`, outputs.
    """

    blocks: Blocks
    parts: int = 1
    transposed: bool = False


@triton.jit
def _grouped_weights(  # type: ignore[no-untyped-def]
    rows, gradient, row_weights, out, source, expert_offsets, size, experts, products, input_rows, gradient_rows,
    sorted_rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATHER: tl.constexpr, TRANSPOSED: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """rows^T @ gradient over a split of an expert's rows.

    Each layer has `input_rows` rows (or, if they are gathered, tokens), `gradient_rows` gradients (with `row_weights`
    those of tokens, which are gathered, times the weight of the row), and `sorted_rows` sources. Each split of an
    expert of a layer has `products` programs.
    """
    program = tl.program_id(0)
    group, program = program // products, program % products
    group, split = group // SPLITS, group % SPLITS
    layer, expert = (group // experts).to(tl.int64), group % experts
    rows += layer * input_rows * INPUTS
    gradient += layer * gradient_rows * OUTPUTS
    source += layer * sorted_rows
    if row_weights is not None:
        row_weights += layer * sorted_rows
    expert_offsets += layer * (experts + 1)
    out += (layer * SPLITS + split) * size
    first = tl.load(expert_offsets + expert)
    steps = (tl.load(expert_offsets + expert + 1) - first) // BLOCK_K
    begin = first + steps * split // SPLITS * BLOCK_K
    end = first + steps * (split + 1) // SPLITS * BLOCK_K
    at = tl.arange(0, BLOCK_K)

    LEFT: tl.constexpr = OUTPUTS if TRANSPOSED else INPUTS
    RIGHT: tl.constexpr = INPUTS if TRANSPOSED else OUTPUTS
    EVEN: tl.constexpr = (LEFT % (BLOCK_M * PARTS) == 0) and (RIGHT % BLOCK_N == 0)
    programs = tl.cdiv(RIGHT, BLOCK_N)
    m = program // programs * BLOCK_M * PARTS + tl.arange(0, BLOCK_M)
    n = program % programs * BLOCK_N + tl.arange(0, BLOCK_N)
    if TRANSPOSED:
        left = gradient + begin.to(tl.int64) * LEFT + at[:, None] * LEFT + m[None, :]
        right = rows + begin.to(tl.int64) * RIGHT + at[:, None] * RIGHT + n[None, :]
    else:
        left = rows + begin.to(tl.int64) * LEFT + at[:, None] * LEFT + m[None, :]
        right = gradient + begin.to(tl.int64) * RIGHT + at[:, None] * RIGHT + n[None, :]
    one = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    two = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    three = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for row in range(begin, end, BLOCK_K):
        if GATHER:
            token = tl.maximum(tl.load(source + row + at), 0).to(tl.int64)[:, None]
            if TRANSPOSED:
                right = rows + token * RIGHT + n[None, :]
            else:
                left = rows + token * LEFT + m[None, :]
        left_weight = None
        right_weight = None
        if row_weights is not None:
            token = tl.load(source + row + at)
            weight = tl.load(row_weights + row + at, mask=token >= 0, other=0.0)  # padding adds nothing
            token = tl.maximum(token, 0).to(tl.int64)[:, None]
            if TRANSPOSED:
                left = gradient + token * LEFT + m[None, :]
                left_weight = weight
            else:
                right = gradient + token * RIGHT + n[None, :]
                right_weight = weight
        b = _load_block(right, n, right_weight, RIGHT, EVEN)
        one = tl.dot(tl.trans(_load_block(left, m, left_weight, LEFT, EVEN)), b, one, input_precision="ieee")
        if PARTS > 1:
            a = _load_block(left + BLOCK_M, m + BLOCK_M, left_weight, LEFT, EVEN)
            two = tl.dot(tl.trans(a), b, two, input_precision="ieee")
        if PARTS > 2:
            a = _load_block(left + 2 * BLOCK_M, m + 2 * BLOCK_M, left_weight, LEFT, EVEN)
            three = tl.dot(tl.trans(a), b, three, input_precision="ieee")
        left += BLOCK_K * LEFT
        right += BLOCK_K * RIGHT
    out += expert.to(tl.int64) * INPUTS * OUTPUTS
    _store_block(out, one, m, n, LEFT, RIGHT, TRANSPOSED)
    if PARTS > 1:
        _store_block(out, two, m + BLOCK_M, n, LEFT, RIGHT, TRANSPOSED)
    if PARTS > 2:
        _store_block(out, three, m + 2 * BLOCK_M, n, LEFT, RIGHT, TRANSPOSED)


@triton.jit
def _load_block(offsets, column, weight, COLUMNS: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    if EVEN:
        block = tl.load(offsets)
    else:
        block = tl.load(offsets, mask=(column < COLUMNS)[None, :], other=0.0)
    if weight is not None:
        block = (block.to(tl.float32) * weight[:, None]).to(block.dtype)
    return block


@triton.jit
def _store_block(out, block, m, n, LEFT: tl.constexpr, RIGHT: tl.constexpr, TRANSPOSED: tl.constexpr):  # type: ignore[no-untyped-def]
    if TRANSPOSED:
        tl.store(out + n[:, None] * LEFT + m[None, :], tl.trans(block), mask=(n < RIGHT)[:, None] & (m < LEFT)[None, :])
    else:
        tl.store(out + m[:, None] * RIGHT + n[None, :], block, mask=(m < LEFT)[:, None] & (n < RIGHT)[None, :])


@triton.jit
def _tile_sums(  # type: ignore[no-untyped-def]
    gradient, source, row_weights, sums, expert_offsets, gradient_rows, rows, experts,
    OUTPUTS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum of each used tile of rows; padding rows are zeros. With `row_weights` as in `_grouped_weights`."""
    programs = tl.cdiv(OUTPUTS, COLUMNS)
    tile, layer = tl.program_id(0) // programs, tl.program_id(1).to(tl.int64)
    if tile * TILE >= tl.load(expert_offsets + layer * (experts + 1) + experts):
        return
    column = tl.program_id(0) % programs * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < OUTPUTS
    row = layer * rows + tile * TILE + tl.arange(0, TILE)
    read = row
    if row_weights is not None:
        token = tl.load(source + row)
        weight = tl.load(row_weights + row, mask=token >= 0, other=0.0)
        read = layer * gradient_rows + tl.maximum(token, 0)
    x = tl.load(gradient + read[:, None] * OUTPUTS + column[None, :], mask=column_mask[None, :], other=0.0)
    x = x.to(tl.float32)
    if row_weights is not None:
        x *= weight[:, None]
    offsets = (layer * (rows // TILE) + tile) * OUTPUTS + column
    tl.store(sums + offsets, tl.sum(x, 0), mask=column_mask)


@triton.jit
def _expert_sums(  # type: ignore[no-untyped-def]
    sums, expert_offsets, total, blocks, experts, outputs, layer_stride,
    BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the sums of blocks of BLOCK_ROWS rows by expert."""
    layer, expert = (tl.program_id(1) // experts).to(tl.int64), tl.program_id(1) % experts
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = (column < outputs)[None, :]
    expert_offsets += layer * (experts + 1) + expert
    first, end = tl.load(expert_offsets) // BLOCK_ROWS, tl.load(expert_offsets + 1) // BLOCK_ROWS
    sums += layer * blocks * outputs
    x = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(first, end, ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        x += tl.load(sums + row * outputs + column[None, :], mask=(row < end) & column_mask, other=0.0)
    tl.store(total + layer * layer_stride + expert * outputs + column, tl.sum(x, 0), mask=column < outputs)


@triton.jit
def _sum_splits(parts, total, size, layer_stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    parts += tl.program_id(1).to(tl.int64) * SPLITS * size
    total += tl.program_id(1).to(tl.int64) * layer_stride
    x = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        x += tl.load(parts + split * size + offsets, mask=mask, other=0.0)
    tl.store(total + offsets, x, mask=mask)


def grouped_weight_gradient(
    rows: Tensor,
    gradient: Tensor,
    permutation: Permutation,
    gather: bool = False,
    bias: bool = False,
    layout: WeightLayout | None = None,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of a weight, float32 [E, in, out], and, if there is a bias, its gradient [E, out].

    With `row_weights` [R], the gradient [N, out] is of the tokens' sums of rows, each times its weight.
    """
    experts, inputs, outputs = permutation.experts, rows.shape[1], gradient.shape[1]
    matrices = experts * inputs * outputs
    total = torch.empty(1, matrices + experts * outputs if bias else matrices, dtype=torch.float32, device=rows.device)
    weights = None if row_weights is None else [row_weights]
    weight_gradients(
        rows.contiguous()[None], gradient.contiguous()[None], [permutation], gather, bias, total, layout, weights
    )
    # As `.data`, so that autograd does not see views of each other.
    weight_gradient = total[0, :matrices].view(experts, inputs, outputs).data
    return weight_gradient, total[0, matrices:].view(experts, outputs).data if bias else None


def weight_gradients(
    rows: Tensor,
    gradients: Tensor,
    permutations: list[Permutation],
    gather: bool,
    bias: bool,
    results: Tensor,
    layout: WeightLayout | None = None,
    row_weights: list[Tensor] | None = None,
) -> None:
    """The same for several layers, [L, ...], into float32 [L, E * in * out], followed by [E * out] of each if `bias`.

    A matrix has few blocks and its sums are long, so an expert's rows may be split among several programs.
    """
    first, (layers, input_rows, inputs), outputs = permutations[0], rows.shape, gradients.shape[2]
    experts, size, matrices = first.experts, results.shape[1], first.experts * inputs * outputs
    assert input_rows == (len(first.row_of_choice) if gather else first.rows)
    assert gradients.shape[:2] == (layers, first.rows if row_weights is None else len(first.row_of_choice))
    gradient_rows, weights = gradients.shape[1], None if row_weights is None else _stacked(row_weights)
    layout = layout or _default_layout(inputs, outputs, rows.dtype)
    left, right = (outputs, inputs) if layout.transposed else (inputs, outputs)
    m, n, k = fit_blocks(layout.blocks, left, right, first.tile)
    products = triton.cdiv(left, m * layout.parts) * triton.cdiv(right, n)
    splits = _splits(products * experts * layers, first.rows // (experts * k), rows.device)
    expert_offsets, source = (
        _stacked([getattr(p, name) for p in permutations]) for name in ("expert_offsets", "source")
    )
    if bias:
        sums = torch.empty(layers, first.rows // first.tile, outputs, dtype=torch.float32, device=rows.device)
        _tile_sums[(first.rows // first.tile * triton.cdiv(outputs, COLUMNS), layers)](
            gradients, source, weights, sums, expert_offsets, gradient_rows, first.rows, experts, outputs, first.tile,
            COLUMNS, num_warps=4,
        )  # fmt: skip
        _sum_by_expert(sums, expert_offsets, results[:, matrices:], first.tile)
    parts = results if splits == 1 else results.new_empty(layers * splits, matrices)
    _grouped_weights[(layers * experts * splits * products,)](
        rows, gradients, weights, parts, source, expert_offsets, size if splits == 1 else matrices, experts, products,
        input_rows, gradient_rows, first.rows, inputs, outputs, gather, layout.transposed, layout.parts, splits,
        m, n, k, **layout.blocks.launch,
    )  # fmt: skip
    if splits > 1:
        grid = (triton.cdiv(matrices, SPLIT_ELEMENTS), layers)
        _sum_splits[grid](parts, results, matrices, size, splits, SPLIT_ELEMENTS, num_warps=4)


def expert_sums(sums: Tensor, permutation: Permutation) -> Tensor:
    """The gradient of a bias, float32 [E, out], from the sums of blocks of rows [blocks, out]."""
    total = sums.new_empty(1, permutation.experts * sums.shape[1])
    _sum_by_expert(sums[None], permutation.expert_offsets, total, permutation.rows // len(sums))
    return total.view(permutation.experts, -1)


def _sum_by_expert(sums: Tensor, expert_offsets: Tensor, results: Tensor, rows: int) -> None:
    """sums [L, blocks, out] of so many rows each, into [L, E * out], which may be strided."""
    layers, blocks, outputs = sums.shape
    experts = results.shape[1] // outputs
    _expert_sums[(triton.cdiv(outputs, SUM_COLUMNS), layers * experts)](
        sums, expert_offsets, results, blocks, experts, outputs, results.stride(0), rows, SUM_ROWS, SUM_COLUMNS,
        num_warps=4,
    )  # fmt: skip


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def _default_layout(inputs: int, outputs: int, dtype: torch.dtype) -> WeightLayout:
    if dtype == torch.float32:
        return WeightLayout(FLOAT32_BLOCKS)
    transposed = inputs > outputs
    narrow, wide = sorted((inputs, outputs))
    columns = next(n for n in (256, 128, 64) if wide % n == 0 or n == 64)
    if narrow % 192 == 0:
        return WeightLayout(Blocks(64, columns, 64, 8, 3), 3, transposed)
    if wide < LARGE:
        return WeightLayout(Blocks(64, 128, 64, 4, 3), 2)
    return WeightLayout(Blocks(128, min(columns, 128), 64, 8, 3), 1, transposed)


def _splits(programs: int, steps: int, device: torch.device) -> int:
    """The number of programs that share a sum of some steps, so that all of them fill the device."""
    return max(1, min(PROGRAMS_PER_SM * multiprocessors(device) // programs, steps // MIN_STEPS))
