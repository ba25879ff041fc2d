"""From rows sorted by expert back to tokens: each token's weighted sum, one pass over memory forward and one backward.

The pass backward goes over the sorted rows, so that padding becomes zeros.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.routed.gradient_stacks import GroupedGradientSlot
from braidlm.kernels.routed.permutation import Permutation

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS, WARPS = 4096, 4
"""Numbers that a program works on."""


@triton.jit
def combined_rows(  # type: ignore[no-untyped-def]
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
    total = combined_rows(rows, weights, slots, token, exists, inside, column, WIDTH, CHOICES)
    offsets = token.to(tl.int64)[:, None] * WIDTH + column
    tl.store(mixed + offsets, total.to(mixed.dtype.element_ty), mask=inside)


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
    offsets = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(rows + offsets, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(gradient + token[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(x * dy, 1)[:, None] + tl.zeros([ROWS, WIDE_CHOICES], tl.float32)
    tl.store(weights_gradient + at, along, mask=mine)
    dy *= weight[:, None]
    tl.store(rows_gradient + offsets, dy.to(rows_gradient.dtype.element_ty), mask=column < WIDTH)


class Combine(torch.autograd.Function):
    """rows [R, width], weights [N, K], the permutation -> [N, width], the sum over k of weight times row.

    Backward, padding rows of used tiles become zeros. `slot` is of the layer that made the rows.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, permutation: Permutation, slot: GroupedGradientSlot | None = None
    ) -> Tensor:
        rows, weights = rows.contiguous(), weights.contiguous()
        ctx.save_for_backward(rows, weights)
        ctx.permutation, ctx.slot = permutation, slot
        return _mixed(rows, weights, permutation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        return *combine_gradients(gradient, rows, weights, ctx.permutation, ctx.slot), None, None


def combine_gradients(
    gradient: Tensor, rows: Tensor, weights: Tensor, permutation: Permutation, slot: GroupedGradientSlot | None
) -> tuple[Tensor, Tensor]:
    """Those of rows and weights, from that of the tokens' sums [N, width]."""
    width, choices = rows.shape[1], weights.shape[1]
    rows_gradient = torch.empty_like(rows) if slot is None else slot.gradient
    weights_gradient = torch.empty_like(weights)
    columns, lines = _block(width)
    lines = min(lines, permutation.tile)
    _mix_backward[(permutation.rows // lines,)](
        gradient.contiguous(), rows, weights, permutation.row_of_choice, permutation.source, permutation.tile_expert,
        rows_gradient, weights_gradient,
        width, choices, triton.next_power_of_2(choices), permutation.tile, lines, columns, num_warps=WARPS,
    )  # fmt: skip
    return rows_gradient, weights_gradient


def summed_rows(rows: Tensor, permutation: Permutation) -> Tensor:
    """The plain sum [N, width] of each token's rows: the gradient of tokens that were read by several experts."""
    return _mixed(rows, None, permutation)


def _mixed(rows: Tensor, weights: Tensor | None, permutation: Permutation) -> Tensor:
    (tokens, choices), width = permutation.row_of_choice.shape, rows.shape[1]
    mixed = rows.new_empty(tokens, width)
    columns, lines = _block(width)
    _mix_forward[(triton.cdiv(tokens, lines),)](
        rows, weights, permutation.row_of_choice, mixed, tokens, width, choices, lines, columns, num_warps=WARPS
    )
    return mixed


def _block(width: int) -> tuple[int, int]:
    columns = triton.next_power_of_2(width)
    return columns, max(1, NUMBERS // columns)


def plain_combine(rows: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
    """The reference, in torch's operations."""
    return (rows[permutation.row_of_choice.long()] * weights[..., None]).sum(1)
