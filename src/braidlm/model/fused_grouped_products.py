"""Products of rows sorted by expert with one matrix per expert, forward, backward and for gradients of the matrices.

What stands before and after a product costs no pass over memory of its own: reading a token for each of its rows,
adding a bias, the activation forward and its slope backward. Padding rows hold finite numbers forward; backward they
hold zeros, so that a sum over an expert's tiles is one over its rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .fused_activation import value_and_slope
from .fused_chance import kept, threshold
from .fused_placing import Placement
from .launching import is_nvidia, processors

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise


@dataclass(frozen=True)
class Blocks:
    """What one program of a product makes, [rows, columns], how much of the sum it reads at once, and by how many."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    registers: int | None = None
    """Of a thread at most, where fewer let a processor take two programs at once."""

    @property
    def launch(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


EXACT = Blocks(64, 64, 32, 4, 2)
"""For float32, which takes twice the memory."""
SMALLEST = 16
"""The least that a tensor core takes of any dimension."""
PROGRAMS_PER_PROCESSOR, LEAST_STEPS = 1, 4
"""Gradients of weights: how many programs are wanted, and how many blocks of rows one should at least sum."""
SUMMED = 2048
"""Numbers that a program of the second stage of such a gradient works on."""


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    left, right, column, INNER: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """left [M, INNER] @ right, and, unless APART is 0, left @ the matrix that begins APART numbers after right."""
    WHOLE: tl.constexpr = (INNER % BLOCK_K == 0) and (COLUMNS % BLOCK_N == 0)
    at = tl.arange(0, BLOCK_K)
    one = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    two = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, INNER, BLOCK_K):
        if WHOLE:
            a = tl.load(left)
            b = tl.load(right)
        else:
            there = begin + at < INNER
            inside = there[:, None] & (column < COLUMNS)[None, :]
            a = tl.load(left, mask=there[None, :], other=0.0)
            b = tl.load(right, mask=inside, other=0.0)
        one = tl.dot(a, b, one, input_precision="ieee")
        if APART:
            if WHOLE:
                b = tl.load(right + APART)
            else:
                b = tl.load(right + APART, mask=inside, other=0.0)
            two = tl.dot(a, b, two, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K * STEP
    return one, two


@triton.jit
def _grouped_forward(  # type: ignore[no-untyped-def]
    rows, weight, bias, base, seed, made, value, source, tile_expert, keep_scale,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, GATHER: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    THRESHOLD: tl.constexpr, FAST: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`made` is the product with its bias, `value` its activation; COLUMNS are of the latter if it is gated."""
    WIDTH: tl.constexpr = COLUMNS * (2 if GATED else 1)
    programs = tl.cdiv(COLUMNS, BLOCK_N)  # of one tile of rows: they follow each other, so its rows are read once
    block = tl.program_id(0) // programs
    expert = tl.load(tile_expert + block * BLOCK_M // TILE)
    if expert < 0:
        return
    first = block.to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % programs * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    if GATHER:
        token = tl.maximum(tl.load(source + first + row), 0)  # padding reads the first: any finite numbers will do
        left = rows + token.to(tl.int64)[:, None] * INNER + at[None, :]
    else:
        left = rows + first * INNER + row[:, None] * INNER + at[None, :]
    right = weight + expert.to(tl.int64) * INNER * WIDTH + at[:, None] * WIDTH + column[None, :]
    APART: tl.constexpr = COLUMNS if GATED else 0
    total, up = _products(left, right, column, INNER, COLUMNS, WIDTH, APART, BLOCK_M, BLOCK_N, BLOCK_K)

    real = column < COLUMNS
    inside = tl.broadcast_to(real[None, :], [BLOCK_M, BLOCK_N])
    if bias is not None:
        bias += expert * WIDTH + column
        total += tl.load(bias, mask=real, other=0.0).to(tl.float32)[None, :]
    made += first * WIDTH
    place = row[:, None] * WIDTH + column[None, :]
    if THRESHOLD:
        total = tl.where(kept(seed, first * WIDTH + place, THRESHOLD), total * keep_scale, 0.0)
    if base is not None:
        total += tl.load(base + first * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(made + place, total.to(made.dtype.element_ty), mask=inside)
    if KIND is not None:
        activated, _ = value_and_slope(total, KIND, FAST)
        if GATED:
            if bias is not None:
                up += tl.load(bias + COLUMNS, mask=real, other=0.0).to(tl.float32)[None, :]
            tl.store(made + place + COLUMNS, up.to(made.dtype.element_ty), mask=inside)
            activated *= up
        place = row[:, None] * COLUMNS + column[None, :]
        tl.store(value + first * COLUMNS + place, activated.to(value.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_backward(  # type: ignore[no-untyped-def]
    gradient, weight, inner, made, tile_expert,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, FAST: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """gradient [R, INNER] through the weight [E, COLUMNS, INNER], and through an activation if there is one."""
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
    left = gradient + first * INNER + row[:, None] * INNER + at[None, :]
    right = weight + expert.to(tl.int64) * INNER * COLUMNS + column[None, :] * INNER + at[:, None]
    inside = tl.broadcast_to((column < COLUMNS)[None, :], [BLOCK_M, BLOCK_N])
    place = row[:, None] * WIDTH + column[None, :]
    if KIND is not None:  # asked for before the product, to be there after it
        inner += first * WIDTH
        x = tl.load(inner + place, mask=inside, other=0.0)
        if GATED:
            up = tl.load(inner + place + COLUMNS, mask=inside, other=0.0)
    total, _ = _products(left, right, column, INNER, COLUMNS, 1, 0, BLOCK_M, BLOCK_N, BLOCK_K)

    made += first * WIDTH
    if KIND is not None:
        value, slope = value_and_slope(x.to(tl.float32), KIND, FAST)
        if GATED:
            tl.store(made + place + COLUMNS, (total * value).to(made.dtype.element_ty), mask=inside)
            slope *= up.to(tl.float32)
        total *= slope
    tl.store(made + place, total.to(made.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_weights(  # type: ignore[no-untyped-def]
    rows, gradient, made, source, starts, size, experts, products, lines, sorted_rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATHER: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """rows^T @ gradient over a share of an expert's rows; programs beyond `products` sum the gradient's columns.

    Of several layers: each has `lines` rows (or tokens to gather from), and `sorted_rows` gradients and sources.
    """
    WHOLE: tl.constexpr = (INPUTS % BLOCK_M == 0) and (OUTPUTS % BLOCK_N == 0)
    programs = tl.cdiv(OUTPUTS, BLOCK_N)
    program = tl.program_id(0)
    group, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    layer, expert = (group // experts).to(tl.int64), group % experts
    rows += layer * lines * INPUTS
    gradient += layer * sorted_rows * OUTPUTS
    source += layer * sorted_rows
    starts += layer * (experts + 1)
    made += layer * SPLITS * size
    first = tl.load(starts + expert)
    steps = (tl.load(starts + expert + 1) - first) // BLOCK_K
    begin = first + steps * split // SPLITS * BLOCK_K
    end = first + steps * (split + 1) // SPLITS * BLOCK_K
    output = program % programs * BLOCK_N + tl.arange(0, BLOCK_N)
    real = output < OUTPUTS
    made += split.to(tl.int64) * size
    at = tl.arange(0, BLOCK_K)
    right = gradient + begin.to(tl.int64) * OUTPUTS + at[:, None] * OUTPUTS + output[None, :]
    if program >= products:
        sums = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        for _ in range(begin, end, BLOCK_K):
            sums += tl.load(right, mask=real[None, :], other=0.0).to(tl.float32)
            right += BLOCK_K * OUTPUTS
        place = experts * INPUTS * OUTPUTS + expert * OUTPUTS + output
        tl.store(made + place, tl.sum(sums, 0), mask=real)
        return
    entry = program // programs * BLOCK_M + tl.arange(0, BLOCK_M)
    left = rows + begin.to(tl.int64) * INPUTS + at[:, None] * INPUTS + entry[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for row in range(begin, end, BLOCK_K):
        if GATHER:
            token = tl.maximum(tl.load(source + row + at), 0)
            left = rows + token.to(tl.int64)[:, None] * INPUTS + entry[None, :]
        if WHOLE:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, mask=(entry < INPUTS)[None, :], other=0.0)
            b = tl.load(right, mask=real[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        left += BLOCK_K * INPUTS
        right += BLOCK_K * OUTPUTS
    place = (expert.to(tl.int64) * INPUTS + entry)[:, None] * OUTPUTS + output[None, :]
    tl.store(made + place, total, mask=(entry < INPUTS)[:, None] & real[None, :])


@triton.jit
def _sum_splits(parts, total, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    parts += tl.program_id(1).to(tl.int64) * SPLITS * size
    total += tl.program_id(1).to(tl.int64) * size
    x = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        x += tl.load(parts + split * size + place, mask=inside, other=0.0)
    tl.store(total + place, x, mask=inside)


def grouped_forward(
    rows: Tensor,
    weight: Tensor,
    placement: Placement,
    bias: Tensor | None = None,
    gather: bool = False,
    activation: str | None = None,
    gated: bool = False,
    blocks: Blocks | None = None,
    base: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    value: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """rows [R, in], or tokens [N, in] to be gathered, through weight [E, in, out] -> [R, out] and None.

    With an activation: its value [R, out], or [R, out / 2] if it is gated, and what it was taken of [R, out]. Without
    one, the product may be dropped by chance and added to `base` [R, out]. `value` is where the activation's goes.
    """
    experts, inputs, outputs = weight.shape
    assert experts == placement.experts
    assert rows.shape == (len(placement.slots) if gather else placement.rows, inputs)
    assert weight.is_contiguous()
    columns = outputs // 2 if gated else outputs
    rule = _product_blocks if activation is None else _activated_blocks
    blocks = blocks or rule(outputs, rows.dtype)
    m, n, k = _fitted(blocks, placement.tile, columns, inputs)
    n = max(SMALLEST, n // 2) if gated else n  # it makes two products
    made = rows.new_empty(placement.rows, outputs)
    if activation is not None and value is None:
        value = rows.new_empty(placement.rows, columns)
    _grouped_forward[(placement.rows // m * triton.cdiv(columns, n),)](
        rows.contiguous(), weight, bias, base, seed, made, value, placement.source, placement.tile_expert,
        1 / (1 - dropout), inputs, columns, gather, activation, gated, threshold(dropout), is_nvidia(rows),
        placement.tile, m, n, k, **blocks.launch,
    )  # fmt: skip
    return (made, None) if value is None else (value, made)


def grouped_backward(
    gradient: Tensor,
    weight: Tensor,
    placement: Placement,
    inner: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    blocks: Blocks | None = None,
    made: Tensor | None = None,
) -> Tensor:
    """gradient [R, out] through weight [E, in, out] -> [R, in], or into `made`.

    With the `inner` of an activation whose value the layer reads: the gradient of inner, as wide as inner.
    """
    experts, columns, outputs = weight.shape
    assert experts == placement.experts
    assert gradient.shape == (placement.rows, outputs)
    assert weight.is_contiguous()
    assert (inner is None) == (activation is None)
    blocks = blocks or _product_blocks(columns, gradient.dtype)
    m, n, k = _fitted(blocks, placement.tile, columns, outputs)
    n = max(SMALLEST, n // 2) if gated else n  # it holds twice the numbers
    if made is None:
        made = gradient.new_empty(placement.rows, columns * 2 if gated else columns)
    _grouped_backward[(placement.rows // m * triton.cdiv(columns, n),)](
        gradient.contiguous(), weight, inner, made, placement.tile_expert,
        outputs, columns, activation, gated, is_nvidia(gradient), placement.tile, m, n, k, **blocks.launch,
    )  # fmt: skip
    return made


def grouped_weight_gradient(
    rows: Tensor,
    gradient: Tensor,
    placement: Placement,
    gather: bool = False,
    bias: bool = False,
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """float32 [E, in, out], the gradient of a weight, and, if there is a bias, its gradient [E, out]."""
    experts, inputs, outputs = placement.experts, rows.shape[1], gradient.shape[1]
    matrices = experts * inputs * outputs
    total = torch.empty(1, matrices + experts * outputs if bias else matrices, dtype=torch.float32, device=rows.device)
    weight_gradients(rows.contiguous()[None], gradient.contiguous()[None], [placement], gather, bias, total, blocks)
    # As `.data`, or to autograd they would be views of each other.
    weight_gradient = total[0, :matrices].view(experts, inputs, outputs).data
    return weight_gradient, total[0, matrices:].view(experts, outputs).data if bias else None


def weight_gradients(
    rows: Tensor,
    gradients: Tensor,
    placements: list[Placement],
    gather: bool,
    bias: bool,
    results: Tensor,
    blocks: Blocks | None = None,
) -> None:
    """The same for several layers, [L, ...], into float32 [L, E * in * out], followed by [E * out] of each if `bias`.

    A matrix has few blocks and its sums are long, so several programs may each take a share of an expert's rows.
    """
    first, (layers, lines, inputs), outputs = placements[0], rows.shape, gradients.shape[2]
    experts, size = first.experts, results.shape[1]
    assert lines == (len(first.slots) if gather else first.rows)
    assert gradients.shape[:2] == (layers, first.rows)
    blocks = blocks or _weight_blocks(inputs, outputs, rows.dtype)
    m, n, k = _fitted(blocks, inputs, outputs, first.tile)
    tiles = triton.cdiv(inputs, m) * triton.cdiv(outputs, n)
    splits = _splits(tiles * experts * layers, first.rows // (experts * k), rows.device)
    starts, source = (_side_by_side([getattr(p, name) for p in placements]) for name in ("starts", "source"))
    parts = results if splits == 1 else results.new_empty(layers * splits, size)
    _grouped_weights[(tiles + triton.cdiv(outputs, n) if bias else tiles, layers * experts * splits)](
        rows, gradients, parts, source, starts, size, experts, tiles, lines, first.rows,
        inputs, outputs, gather, splits, m, n, k, **blocks.launch,
    )  # fmt: skip
    if splits > 1:
        _sum_splits[(triton.cdiv(size, SUMMED), layers)](parts, results, size, splits, SUMMED, num_warps=4)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts)


# The shapes of blocks below were the fastest of twelve on an H200 for banks of 192-768 and 384-768 channels.


def _product_blocks(columns: int, dtype: torch.dtype) -> Blocks:
    if dtype == torch.float32:
        return EXACT
    return Blocks(64, 128, 64, 4, 3) if columns % 128 == 0 else Blocks(128, 64, 64, 4, 3)


def _activated_blocks(columns: int, dtype: torch.dtype) -> Blocks:
    if dtype == torch.float32:
        return EXACT
    return Blocks(128, 128 if columns % 128 == 0 else 64, 64, 8, 3)


def _weight_blocks(inputs: int, outputs: int, dtype: torch.dtype) -> Blocks:
    """`rows` are inputs, and `inner` counts sorted rows."""
    if dtype == torch.float32:
        return EXACT
    return Blocks(128, 64, 64, 4, 3) if inputs > outputs else Blocks(64, 128, 64, 4, 4)


def _fitted(blocks: Blocks, rows: int, columns: int, inner: int) -> tuple[int, int, int]:
    """No block is much larger than what there is of a dimension."""
    sizes = zip((blocks.rows, blocks.columns, blocks.inner), (rows, columns, inner), strict=True)
    m, n, k = (min(block, max(SMALLEST, triton.next_power_of_2(size))) for block, size in sizes)
    return m, n, k


def _splits(programs: int, steps: int, device: torch.device) -> int:
    """How many programs share a sum of some steps, so that all of them fill the device."""
    return max(1, min(PROGRAMS_PER_PROCESSOR * processors(device) // programs, steps // LEAST_STEPS))


def plain_grouped(
    rows: Tensor, weight: Tensor, placement: Placement, bias: Tensor | None = None, gather: bool = False
) -> Tensor:
    """The reference of a product: every expert on every row, and what is not its own hidden."""
    rows = rows[placement.source.clamp_min(0).long()] if gather else rows
    owner = placement.tile_expert.repeat_interleave(placement.tile)
    made = rows.new_zeros(placement.rows, weight.shape[2])
    for expert in range(len(weight)):
        own = rows @ weight[expert]
        own = own if bias is None else own + bias[expert]
        made = torch.where((owner == expert)[:, None], own, made)
    return made
