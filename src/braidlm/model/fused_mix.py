"""From rows sorted by expert back to tokens: each token's weighted sum, one pass over memory forward and one backward.

The pass backward goes over the sorted rows, so that padding becomes zeros and an expert's bias has its gradient summed
on the way.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused_placing import Placement
from .grouped_stacks import GroupedPlace

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS, WARPS = 4096, 4
"""Numbers that a program works on."""
SUMMED, COLUMNS = 256, 16
"""Sums that the second stage reads at once, and how many of their columns."""


@triton.jit
def _mix_forward(  # type: ignore[no-untyped-def]
    rows, bias, weights, slots, chosen, mixed, tokens,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = token < tokens
    column = tl.arange(0, COLUMNS)[None, :]
    inside = exists[:, None] & (column < WIDTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for choice in tl.static_range(CHOICES):
        at = token * CHOICES + choice
        slot = tl.load(slots + at, mask=exists, other=0).to(tl.int64)
        x = tl.load(rows + slot[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            expert = tl.load(chosen + at, mask=exists, other=0).to(tl.int32)
            x += tl.load(bias + expert[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            x *= tl.load(weights + at, mask=exists, other=0.0)[:, None]
        total += x
    place = token.to(tl.int64)[:, None] * WIDTH + column
    tl.store(mixed + place, total.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _mix_backward(  # type: ignore[no-untyped-def]
    gradient, rows, bias, weights, slots, source, tile_expert, rows_gradient, weights_gradient, sums,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, WIDE_CHOICES: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    expert = tl.load(tile_expert + program * ROWS // TILE)
    if expert < 0:
        return
    row = program * ROWS + tl.arange(0, ROWS)
    token = tl.load(source + row)
    real = token >= 0
    token = tl.maximum(token, 0).to(tl.int64)
    choice = tl.arange(0, WIDE_CHOICES)[None, :]
    at = token[:, None] * CHOICES + choice
    mine = real[:, None] & (choice < CHOICES)
    mine = mine & (tl.load(slots + at, mask=mine, other=-1) == row[:, None])
    weight = tl.sum(tl.load(weights + at, mask=mine, other=0.0), 1)

    column = tl.arange(0, COLUMNS)[None, :]
    inside = real[:, None] & (column < WIDTH)
    place = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + expert * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    dy = tl.load(gradient + token[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(x * dy, 1)[:, None] + tl.zeros([ROWS, WIDE_CHOICES], tl.float32)
    tl.store(weights_gradient + at, along, mask=mine)
    dy *= weight[:, None]
    tl.store(rows_gradient + place, dy.to(rows_gradient.dtype.element_ty), mask=column < WIDTH)
    if bias is not None:
        column = tl.arange(0, COLUMNS)
        tl.store(sums + program.to(tl.int64) * WIDTH + column, tl.sum(dy, 0), mask=column < WIDTH)


@triton.jit
def _expert_sums(  # type: ignore[no-untyped-def]
    sums, starts, totals, WIDTH: tl.constexpr, ROWS: tl.constexpr, SUMMED: tl.constexpr, COLUMNS: tl.constexpr
):
    """The second stage: what programs of `ROWS` rows have each summed becomes one vector for each expert."""
    expert = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first, last = tl.load(starts + expert) // ROWS, tl.load(starts + expert + 1) // ROWS
    total = tl.zeros([SUMMED, COLUMNS], tl.float32)
    for begin in range(first, last, SUMMED):
        at = (begin + tl.arange(0, SUMMED))[:, None]
        inside = (at < last) & (column < WIDTH)[None, :]
        total += tl.load(sums + at.to(tl.int64) * WIDTH + column[None, :], mask=inside, other=0.0)
    tl.store(totals + expert * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


class Mix(torch.autograd.Function):
    """rows [R, width], a bias [E, width] or None, weights [N, K], the placement, chosen [N, K] -> [N, width].

    The sum over k of weight times (row + the bias of its expert). Backward, padding rows of used tiles become zeros.
    `place` is of the layer that made the rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        bias: Tensor | None,
        weights: Tensor,
        placement: Placement,
        chosen: Tensor,
        place: GroupedPlace | None = None,
    ) -> Tensor:
        rows, weights = rows.contiguous(), weights.contiguous()
        ctx.save_for_backward(rows, bias, weights)
        ctx.placement, ctx.place = placement, place
        return _mixed(rows, bias, weights, placement, chosen.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, bias, weights), placement = ctx.saved_tensors, ctx.placement
        width, choices = rows.shape[1], weights.shape[1]
        rows_gradient = torch.empty_like(rows) if ctx.place is None else ctx.place.gradient
        weights_gradient = torch.empty_like(weights)
        columns, lines = _block(width)
        lines = min(lines, placement.tile)
        programs = placement.rows // lines
        sums = None if bias is None else torch.empty(programs, width, dtype=torch.float32, device=rows.device)
        _mix_backward[(programs,)](
            gradient.contiguous(), rows, bias, weights, placement.slots, placement.source, placement.tile_expert,
            rows_gradient, weights_gradient, sums,
            width, choices, triton.next_power_of_2(choices), placement.tile, lines, columns, num_warps=WARPS,
        )  # fmt: skip
        bias_gradient = None
        if sums is not None:
            bias_gradient = sums.new_empty(placement.experts, width)
            grid = (triton.cdiv(width, COLUMNS), placement.experts)
            _expert_sums[grid](sums, placement.starts, bias_gradient, width, lines, SUMMED, COLUMNS, num_warps=WARPS)
        return rows_gradient, bias_gradient, weights_gradient, None, None, None


def summed_rows(rows: Tensor, placement: Placement) -> Tensor:
    """The plain sum [N, width] of each token's rows: the gradient of tokens that were read by several experts."""
    return _mixed(rows, None, None, placement, None)


def _mixed(
    rows: Tensor, bias: Tensor | None, weights: Tensor | None, placement: Placement, chosen: Tensor | None
) -> Tensor:
    (tokens, choices), width = placement.slots.shape, rows.shape[1]
    mixed = rows.new_empty(tokens, width)
    columns, lines = _block(width)
    _mix_forward[(triton.cdiv(tokens, lines),)](
        rows, bias, weights, placement.slots, chosen, mixed, tokens, width, choices, lines, columns, num_warps=WARPS
    )
    return mixed


def _block(width: int) -> tuple[int, int]:
    columns = triton.next_power_of_2(width)
    return columns, max(1, NUMBERS // columns)


def plain_mix(rows: Tensor, bias: Tensor | None, weights: Tensor, placement: Placement, chosen: Tensor) -> Tensor:
    """The reference, in torch's operations."""
    made = rows[placement.slots.long()]
    if bias is not None:
        made = made + bias[chosen.long()]
    return (made * weights[..., None]).sum(1)
