"""From rows sorted by expert back to tokens: each token's weighted sum, one pass over memory forward and one backward.

The pass backward goes over the sorted rows, so that padding becomes zeros.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.routed.grouped_stacks import GroupedPlace
from braidlm.kernels.routed.placement import Placement

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS, WARPS = 4096, 4
"""Numbers that a program works on."""


@triton.jit
def mixed_rows(  # type: ignore[no-untyped-def]
    rows, weights, slots, token, exists, inside, column, WIDTH: tl.constexpr, CHOICES: tl.constexpr
):
    """Of some tokens: the sum of their rows, each times its weight if there are weights, in float32."""
    total = tl.zeros(inside.shape, tl.float32)
    for choice in tl.static_range(CHOICES):
        at = token * CHOICES + choice
        slot = tl.load(slots + at, mask=exists, other=0).to(tl.int64)
        x = tl.load(rows + slot[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            x *= tl.load(weights + at, mask=exists, other=0.0)[:, None]
        total += x
    return total


@triton.jit
def _mix_forward(  # type: ignore[no-untyped-def]
    rows, weights, slots, mixed, tokens,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = token < tokens
    column = tl.arange(0, COLUMNS)[None, :]
    inside = exists[:, None] & (column < WIDTH)
    total = mixed_rows(rows, weights, slots, token, exists, inside, column, WIDTH, CHOICES)
    place = token.to(tl.int64)[:, None] * WIDTH + column
    tl.store(mixed + place, total.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _mix_backward(  # type: ignore[no-untyped-def]
    gradient, rows, weights, slots, source, tile_expert, rows_gradient, weights_gradient,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, WIDE_CHOICES: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(tile_expert + program * ROWS // TILE) < 0:
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
    dy = tl.load(gradient + token[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(x * dy, 1)[:, None] + tl.zeros([ROWS, WIDE_CHOICES], tl.float32)
    tl.store(weights_gradient + at, along, mask=mine)
    dy *= weight[:, None]
    tl.store(rows_gradient + place, dy.to(rows_gradient.dtype.element_ty), mask=column < WIDTH)


class Mix(torch.autograd.Function):
    """rows [R, width], weights [N, K], the placement -> [N, width], the sum over k of weight times row.

    Backward, padding rows of used tiles become zeros. `place` is of the layer that made the rows.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, placement: Placement, place: GroupedPlace | None = None
    ) -> Tensor:
        rows, weights = rows.contiguous(), weights.contiguous()
        ctx.save_for_backward(rows, weights)
        ctx.placement, ctx.place = placement, place
        return _mixed(rows, weights, placement)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        return *mix_gradients(gradient, rows, weights, ctx.placement, ctx.place), None, None


def mix_gradients(
    gradient: Tensor, rows: Tensor, weights: Tensor, placement: Placement, place: GroupedPlace | None
) -> tuple[Tensor, Tensor]:
    """Those of rows and weights, from that of the tokens' sums [N, width]."""
    width, choices = rows.shape[1], weights.shape[1]
    rows_gradient = torch.empty_like(rows) if place is None else place.gradient
    weights_gradient = torch.empty_like(weights)
    columns, lines = _block(width)
    lines = min(lines, placement.tile)
    _mix_backward[(placement.rows // lines,)](
        gradient.contiguous(), rows, weights, placement.slots, placement.source, placement.tile_expert,
        rows_gradient, weights_gradient,
        width, choices, triton.next_power_of_2(choices), placement.tile, lines, columns, num_warps=WARPS,
    )  # fmt: skip
    return rows_gradient, weights_gradient


def summed_rows(rows: Tensor, placement: Placement) -> Tensor:
    """The plain sum [N, width] of each token's rows: the gradient of tokens that were read by several experts."""
    return _mixed(rows, None, placement)


def _mixed(rows: Tensor, weights: Tensor | None, placement: Placement) -> Tensor:
    (tokens, choices), width = placement.slots.shape, rows.shape[1]
    mixed = rows.new_empty(tokens, width)
    columns, lines = _block(width)
    _mix_forward[(triton.cdiv(tokens, lines),)](
        rows, weights, placement.slots, mixed, tokens, width, choices, lines, columns, num_warps=WARPS
    )
    return mixed


def _block(width: int) -> tuple[int, int]:
    columns = triton.next_power_of_2(width)
    return columns, max(1, NUMBERS // columns)


def plain_mix(rows: Tensor, weights: Tensor, placement: Placement) -> Tensor:
    """The reference, in torch's operations."""
    return (rows[placement.slots.long()] * weights[..., None]).sum(1)
