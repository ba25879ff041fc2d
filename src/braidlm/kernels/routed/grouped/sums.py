"""Sums over the rows of each expert, which are the gradients of biases; of one layer or of several."""

from collections.abc import Iterable

import torch
from torch import Tensor

from braidlm.kernels.ops.launch import MIN_BLOCK
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.permutation import Permutation

COLUMNS = 64
"""Columns that a program sums over a tile of rows."""
SUM_ROWS, SUM_COLUMNS = 64, 32
"""A block of such sums where they are added up by expert."""
TOKENS, TOKEN_COLUMNS, TOKEN_SPLITS = 128, 128, 16
"""Where weighted tokens are summed: a block of them and its columns, and how many programs share a sum."""
SPLIT_ELEMENTS = 2048
"""Elements of a block where the splits of a sum are added up."""


@triton.jit
def _tile_sums(  # type: ignore[no-untyped-def]
    gradient, sums, expert_offsets, rows, experts, OUTPUTS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sum of each used tile of rows; padding rows are zeros."""
    programs = tl.cdiv(OUTPUTS, COLUMNS)
    tile, layer = tl.program_id(0) // programs, tl.program_id(1).to(tl.int64)
    if tile * TILE >= tl.load(expert_offsets + layer * (experts + 1) + experts):
        return
    column = tl.program_id(0) % programs * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < OUTPUTS
    row = layer * rows + tile * TILE + tl.arange(0, TILE)
    x = tl.load(gradient + row[:, None] * OUTPUTS + column[None, :], mask=column_mask[None, :], other=0.0)
    offsets = (layer * (rows // TILE) + tile) * OUTPUTS + column
    tl.store(sums + offsets, tl.sum(x.to(tl.float32), 0), mask=column_mask)


@triton.jit
def _token_sums(  # type: ignore[no-untyped-def]
    gradient, row_weights, row_of_choice, tile_expert, sums, tokens, rows, experts, chunk,
    OUTPUTS: tl.constexpr, CHOICES: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """For each expert, the gradients of a chunk of tokens, each times the weight that the expert has for the token.

    As the product of a matrix [expert, token] that is mostly zeros: tokens are read once, and not once for each choice.
    """
    split, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < OUTPUTS
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS, COLUMNS], tl.float32)
    for begin in range(split * chunk, tl.minimum(tokens, (split + 1) * chunk), TOKENS):
        token = begin + tl.arange(0, TOKENS)
        token_mask = token < tokens
        matrix = tl.zeros([EXPERTS, TOKENS], tl.float32)
        for choice in tl.static_range(CHOICES):
            row = tl.load(row_of_choice + (layer * tokens + token) * CHOICES + choice, mask=token_mask, other=0)
            own = tl.load(tile_expert + layer * (rows // TILE) + row // TILE)
            weight = tl.load(row_weights + layer * rows + row, mask=token_mask, other=0.0)
            matrix += tl.where(expert[:, None] == own[None, :], weight[None, :], 0.0)
        offsets = (layer * tokens + token)[:, None] * OUTPUTS + column[None, :]
        dy = tl.load(gradient + offsets, mask=token_mask[:, None] & column_mask[None, :], other=0.0)
        upper = matrix.to(dy.dtype)
        total = tl.dot(upper, dy, total, input_precision="ieee")
        if dy.dtype != tl.float32:  # what was rounded away: the weights count as exactly as in float32
            total = tl.dot((matrix - upper.to(tl.float32)).to(dy.dtype), dy, total)
    offsets = (layer * tl.num_programs(1) + split) * experts * OUTPUTS + expert[:, None] * OUTPUTS + column[None, :]
    tl.store(sums + offsets, total, mask=(expert < experts)[:, None] & column_mask[None, :])


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


def row_sums(rows: Tensor, expert_offsets: Tensor, permutation: Permutation, results: Tensor) -> None:
    """rows [L, R, out] -> [L, E * out], which may be strided; `expert_offsets` are those of all layers."""
    layers, count, outputs = rows.shape
    tiles = count // permutation.tile
    sums = rows.new_empty(layers, tiles, outputs, dtype=torch.float32)
    _tile_sums[(tiles * triton.cdiv(outputs, COLUMNS), layers)](
        rows, sums, expert_offsets, count, permutation.experts, outputs, permutation.tile, COLUMNS, num_warps=4
    )
    _sum_by_expert(sums, expert_offsets, results, permutation.tile)


def weighted_sums(tokens: Tensor, row_weights: Tensor, permutations: list[Permutation], results: Tensor) -> None:
    """tokens [L, N, out], each in the sums of all its experts, with the weights [L, R] of its rows -> [L, E * out]."""
    first, (layers, count, outputs) = permutations[0], tokens.shape
    experts, choices = first.experts, first.row_of_choice.shape[1]
    row_of_choice = stacked(p.row_of_choice for p in permutations)
    tile_expert = stacked(p.tile_expert for p in permutations)
    chunk = TOKENS * triton.cdiv(triton.cdiv(count, TOKENS), TOKEN_SPLITS)
    splits = triton.cdiv(count, chunk)
    sums = tokens.new_empty(layers, splits, experts * outputs, dtype=torch.float32)
    _token_sums[(triton.cdiv(outputs, TOKEN_COLUMNS), splits, layers)](
        tokens, row_weights, row_of_choice, tile_expert, sums, count, first.rows, experts, chunk,
        outputs, choices, first.tile, TOKENS, max(MIN_BLOCK, triton.next_power_of_2(experts)), TOKEN_COLUMNS,
        num_warps=4,
    )  # fmt: skip
    sum_splits(sums, results)


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


def sum_splits(parts: Tensor, results: Tensor) -> None:
    """parts [L, splits, size] -> the first `size` of each of the results [L, ...]."""
    layers, splits, size = parts.shape
    grid = (triton.cdiv(size, SPLIT_ELEMENTS), layers)
    _sum_splits[grid](parts, results, size, results.stride(0), splits, SPLIT_ELEMENTS, num_warps=4)


def stacked(parts: Iterable[Tensor]) -> Tensor:
    """The parts of all layers as one tensor [L, ...], where there are several."""
    first, *others = parts
    return torch.stack([first, *others]) if others else first
