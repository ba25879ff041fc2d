"""Gradients of the matrices and biases of experts: sums over rows sorted by expert, of one layer or of several.

A block of a matrix is read from long sums and so limited by config often rows are read again: the larger the blocks, the
less. Widths of small models are often three times a power of two, which no block is; so a program may hold up to three
blocks side by side, which share what they read of the wider side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from braidlm.kernels.ops.launching import processors
from braidlm.kernels.routed.grouped_products import EXACT, Blocks, fitted
from braidlm.kernels.routed.permutation import Permutation

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

PROGRAMS_PER_PROCESSOR, LEAST_STEPS = 1, 4
"""How many programs are wanted, and config many blocks of rows one should at least sum."""
SUMMED = 2048
"""Numbers that a program of the second stage works on."""
COLUMNS = 64
"""Of a bias, summed by one program over a tile of rows."""
SUMMED_ROWS, SUMMED_COLUMNS = 64, 32
"""Such sums that a program of the second stage reads at once."""


@dataclass(frozen=True)
class Cut:
    """The part of a matrix that a program makes: `parts` blocks side by side, whose `inner` counts sorted rows.

    The rows of blocks are inputs of the layer, or, `turned`, outputs.
    """

    blocks: Blocks
    parts: int = 1
    turned: bool = False


@triton.jit
def _grouped_weights(  # type: ignore[no-untyped-def]
    rows, gradient, made, source, starts, size, experts, products, lines, sorted_rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATHER: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """rows^T @ gradient over a share of an expert's rows.

    Of several layers: each has `lines` rows (or tokens to gather from), and `sorted_rows` gradients and sources. Each
    share of an expert of a layer has `products` programs.
    """
    program = tl.program_id(0)
    group, program = program // products, program % products
    group, split = group // SPLITS, group % SPLITS
    layer, expert = (group // experts).to(tl.int64), group % experts
    rows += layer * lines * INPUTS
    gradient += layer * sorted_rows * OUTPUTS
    source += layer * sorted_rows
    starts += layer * (experts + 1)
    made += (layer * SPLITS + split) * size
    first = tl.load(starts + expert)
    steps = (tl.load(starts + expert + 1) - first) // BLOCK_K
    begin = first + steps * split // SPLITS * BLOCK_K
    end = first + steps * (split + 1) // SPLITS * BLOCK_K
    at = tl.arange(0, BLOCK_K)

    LEFT: tl.constexpr = OUTPUTS if TURNED else INPUTS
    RIGHT: tl.constexpr = INPUTS if TURNED else OUTPUTS
    WHOLE: tl.constexpr = (LEFT % (BLOCK_M * PARTS) == 0) and (RIGHT % BLOCK_N == 0)
    programs = tl.cdiv(RIGHT, BLOCK_N)
    m = program // programs * BLOCK_M * PARTS + tl.arange(0, BLOCK_M)
    n = program % programs * BLOCK_N + tl.arange(0, BLOCK_N)
    if TURNED:
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
            if TURNED:
                right = rows + token * RIGHT + n[None, :]
            else:
                left = rows + token * LEFT + m[None, :]
        b = _entries(right, n, RIGHT, WHOLE)
        one = tl.dot(tl.trans(_entries(left, m, LEFT, WHOLE)), b, one, input_precision="ieee")
        if PARTS > 1:
            a = _entries(left + BLOCK_M, m + BLOCK_M, LEFT, WHOLE)
            two = tl.dot(tl.trans(a), b, two, input_precision="ieee")
        if PARTS > 2:
            a = _entries(left + 2 * BLOCK_M, m + 2 * BLOCK_M, LEFT, WHOLE)
            three = tl.dot(tl.trans(a), b, three, input_precision="ieee")
        left += BLOCK_K * LEFT
        right += BLOCK_K * RIGHT
    made += expert.to(tl.int64) * INPUTS * OUTPUTS
    _store(made, one, m, n, LEFT, RIGHT, TURNED)
    if PARTS > 1:
        _store(made, two, m + BLOCK_M, n, LEFT, RIGHT, TURNED)
    if PARTS > 2:
        _store(made, three, m + 2 * BLOCK_M, n, LEFT, RIGHT, TURNED)


@triton.jit
def _entries(offsets, column, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        return tl.load(offsets)
    else:
        return tl.load(offsets, mask=(column < COLUMNS)[None, :], other=0.0)


@triton.jit
def _store(made, block, m, n, LEFT: tl.constexpr, RIGHT: tl.constexpr, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    if TURNED:
        tl.store(
            made + n[:, None] * LEFT + m[None, :], tl.trans(block), mask=(n < RIGHT)[:, None] & (m < LEFT)[None, :]
        )
    else:
        tl.store(made + m[:, None] * RIGHT + n[None, :], block, mask=(m < LEFT)[:, None] & (n < RIGHT)[None, :])


@triton.jit
def _tile_sums(  # type: ignore[no-untyped-def]
    gradient, sums, starts, rows, experts, OUTPUTS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sum of each tile of rows that is used; padding rows are zeros."""
    programs = tl.cdiv(OUTPUTS, COLUMNS)
    tile, layer = tl.program_id(0) // programs, tl.program_id(1).to(tl.int64)
    if tile * TILE >= tl.load(starts + layer * (experts + 1) + experts):
        return
    column = tl.program_id(0) % programs * COLUMNS + tl.arange(0, COLUMNS)
    real = column < OUTPUTS
    row = layer * rows + tile * TILE + tl.arange(0, TILE)
    x = tl.load(gradient + row[:, None] * OUTPUTS + column[None, :], mask=real[None, :], other=0.0)
    offsets = (layer * (rows // TILE) + tile) * OUTPUTS + column
    tl.store(sums + offsets, tl.sum(x.to(tl.float32), 0), mask=real)


@triton.jit
def _expert_sums(  # type: ignore[no-untyped-def]
    sums, starts, total, blocks, experts, outputs, apart, EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sums of blocks of EACH rows become those of experts."""
    layer, expert = (tl.program_id(1) // experts).to(tl.int64), tl.program_id(1) % experts
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = (column < outputs)[None, :]
    starts += layer * (experts + 1) + expert
    first, end = tl.load(starts) // EACH, tl.load(starts + 1) // EACH
    sums += layer * blocks * outputs
    x = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(first, end, ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        x += tl.load(sums + row * outputs + column[None, :], mask=(row < end) & real, other=0.0)
    tl.store(total + layer * apart + expert * outputs + column, tl.sum(x, 0), mask=column < outputs)


@triton.jit
def _sum_splits(parts, total, size, apart, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    parts += tl.program_id(1).to(tl.int64) * SPLITS * size
    total += tl.program_id(1).to(tl.int64) * apart
    x = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        x += tl.load(parts + split * size + offsets, mask=inside, other=0.0)
    tl.store(total + offsets, x, mask=inside)


def grouped_weight_gradient(
    rows: Tensor,
    gradient: Tensor,
    permutation: Permutation,
    gather: bool = False,
    bias: bool = False,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor | None]:
    """float32 [E, in, out], the gradient of a weight, and, if there is a bias, its gradient [E, out]."""
    experts, inputs, outputs = permutation.experts, rows.shape[1], gradient.shape[1]
    matrices = experts * inputs * outputs
    total = torch.empty(1, matrices + experts * outputs if bias else matrices, dtype=torch.float32, device=rows.device)
    weight_gradients(rows.contiguous()[None], gradient.contiguous()[None], [permutation], gather, bias, total, cut)
    # As `.data`, or to autograd they would be views of each other.
    weight_gradient = total[0, :matrices].view(experts, inputs, outputs).data
    return weight_gradient, total[0, matrices:].view(experts, outputs).data if bias else None


def weight_gradients(
    rows: Tensor,
    gradients: Tensor,
    permutations: list[Permutation],
    gather: bool,
    bias: bool,
    results: Tensor,
    cut: Cut | None = None,
) -> None:
    """The same for several layers, [L, ...], into float32 [L, E * in * out], followed by [E * out] of each if `bias`.

    A matrix has few blocks and its sums are long, so several programs may each take a share of an expert's rows.
    """
    first, (layers, lines, inputs), outputs = permutations[0], rows.shape, gradients.shape[2]
    experts, size, matrices = first.experts, results.shape[1], first.experts * inputs * outputs
    assert lines == (len(first.row_of_choice) if gather else first.rows)
    assert gradients.shape[:2] == (layers, first.rows)
    cut = cut or _cut(inputs, outputs, rows.dtype)
    left, right = (outputs, inputs) if cut.turned else (inputs, outputs)
    m, n, k = fitted(cut.blocks, left, right, first.tile)
    products = triton.cdiv(left, m * cut.parts) * triton.cdiv(right, n)
    splits = _splits(products * experts * layers, first.rows // (experts * k), rows.device)
    starts, source = (_side_by_side([getattr(p, name) for p in permutations]) for name in ("starts", "source"))
    if bias:
        sums = torch.empty(layers, first.rows // first.tile, outputs, dtype=torch.float32, device=rows.device)
        _tile_sums[(first.rows // first.tile * triton.cdiv(outputs, COLUMNS), layers)](
            gradients, sums, starts, first.rows, experts, outputs, first.tile, COLUMNS, num_warps=4
        )
        _sum_by_expert(sums, starts, results[:, matrices:], first.tile)
    parts = results if splits == 1 else results.new_empty(layers * splits, matrices)
    _grouped_weights[(layers * experts * splits * products,)](
        rows, gradients, parts, source, starts, size if splits == 1 else matrices, experts, products, lines,
        first.rows, inputs, outputs, gather, cut.turned, cut.parts, splits, m, n, k, **cut.blocks.launch,
    )  # fmt: skip
    if splits > 1:
        grid = (triton.cdiv(matrices, SUMMED), layers)
        _sum_splits[grid](parts, results, matrices, size, splits, SUMMED, num_warps=4)


def expert_sums(sums: Tensor, permutation: Permutation) -> Tensor:
    """float32 [E, out], the gradient of a bias, from the sums of blocks of rows [blocks, out]."""
    total = sums.new_empty(1, permutation.experts * sums.shape[1])
    _sum_by_expert(sums[None], permutation.starts, total, permutation.rows // len(sums))
    return total.view(permutation.experts, -1)


def _sum_by_expert(sums: Tensor, starts: Tensor, results: Tensor, rows: int) -> None:
    """sums [L, blocks, out] of so many rows each, into [L, E * out], whose rows may stand further apart."""
    layers, blocks, outputs = sums.shape
    experts = results.shape[1] // outputs
    _expert_sums[(triton.cdiv(outputs, SUMMED_COLUMNS), layers * experts)](
        sums, starts, results, blocks, experts, outputs, results.stride(0), rows, SUMMED_ROWS, SUMMED_COLUMNS,
        num_warps=4,
    )  # fmt: skip


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def _cut(inputs: int, outputs: int, dtype: torch.dtype) -> Cut:
    if dtype == torch.float32:
        return Cut(EXACT)
    turned = inputs > outputs
    narrow, wide = sorted((inputs, outputs))
    columns = next(n for n in (256, 128, 64) if wide % n == 0 or n == 64)
    if narrow % 192 == 0:
        return Cut(Blocks(64, columns, 64, 8, 3), 3, turned)
    return Cut(Blocks(128, min(columns, 128), 64, 8, 3), 1, turned)


def _splits(programs: int, steps: int, device: torch.device) -> int:
    """How many programs share a sum of some steps, so that all of them fill the device."""
    return max(1, min(PROGRAMS_PER_PROCESSOR * processors(device) // programs, steps // LEAST_STEPS))
