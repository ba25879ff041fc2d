"""Rows sorted by expert in the order of their tokens, and back: one pass over memory each, and each other's gradient.

Attention needs the queries of a token beside each other, [token, kv head, choice, channels of that kv head], so that
all heads that share a key follow one another. In sorted rows a choice's channels follow one another.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.combine import WARPS, block_shape
from braidlm.kernels.routed.permutation import Permutation


@triton.jit
def _token_offsets(token, choice, column, WIDTH: tl.constexpr, CHOICES: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the channels of a token's choice lie; PART channels belong to one kv head."""
    start = token.to(tl.int64) * CHOICES * WIDTH + choice * PART
    return start[:, None] + column // PART * (CHOICES * PART) + column % PART


@triton.jit
def _to_tokens(  # type: ignore[no-untyped-def]
    rows, row_of_choice, out, tokens,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, choice = item // CHOICES, item % CHOICES
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (token < tokens)[:, None] & (column < WIDTH)
    row = tl.load(row_of_choice + item, mask=token < tokens, other=0).to(tl.int64)
    x = tl.load(rows + row[:, None] * WIDTH + column, mask=mask, other=0.0)
    tl.store(out + _token_offsets(token, choice, column, WIDTH, CHOICES, PART), x, mask=mask)


@triton.jit
def _to_rows(  # type: ignore[no-untyped-def]
    tokens, row_of_choice, source, tile_expert, out,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(tile_expert + program * ROWS // TILE) < 0:
        return
    row = program * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    token = tl.load(source + row)
    real = token >= 0
    choice = tl.zeros([ROWS], tl.int32)
    for other in tl.static_range(CHOICES):
        own = tl.load(row_of_choice + token * CHOICES + other, mask=real, other=-1) == row
        choice = tl.where(own, other, choice)
    offsets = _token_offsets(token, choice, column, WIDTH, CHOICES, PART)
    x = tl.load(tokens + offsets, mask=real[:, None] & (column < WIDTH), other=0.0)  # zeros for padding
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column, x, mask=column < WIDTH)


class ToTokens(torch.autograd.Function):
    """rows [R, width] -> [N, choices * width]; `slot` is of the layer that computed the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation, kv_heads: int, slot: GradientSlot | None) -> Tensor:
        ctx.permutation, ctx.kv_heads, ctx.slot = permutation, kv_heads, slot
        return to_tokens(rows, permutation, kv_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        out = None if ctx.slot is None else ctx.slot.gradient
        return to_rows(gradient, ctx.permutation, ctx.kv_heads, out), None, None, None


class ToRows(torch.autograd.Function):
    """[N, choices * width] -> rows [R, width]; `slot` is of the layer that reads the rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, permutation: Permutation, kv_heads: int, slot: GradientSlot | None) -> Tensor:
        ctx.permutation, ctx.kv_heads = permutation, kv_heads
        return to_rows(tokens, permutation, kv_heads, None if slot is None else slot.input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return to_tokens(gradient, ctx.permutation, ctx.kv_heads), None, None, None


def to_tokens(rows: Tensor, permutation: Permutation, kv_heads: int) -> Tensor:
    (tokens, choices), width = permutation.row_of_choice.shape, rows.shape[1]
    out = rows.new_empty(tokens, choices * width)
    columns, block_rows = block_shape(width)
    _to_tokens[(triton.cdiv(tokens * choices, block_rows),)](
        rows.contiguous(), permutation.row_of_choice, out, tokens,
        width, choices, width // kv_heads, block_rows, columns, num_warps=WARPS,
    )  # fmt: skip
    return out


def to_rows(tokens: Tensor, permutation: Permutation, kv_heads: int, out: Tensor | None = None) -> Tensor:
    choices = permutation.row_of_choice.shape[1]
    width = tokens.shape[1] // choices
    out = tokens.new_empty(permutation.rows, width) if out is None else out
    columns, block_rows = block_shape(width)
    block_rows = min(block_rows, permutation.tile)
    _to_rows[(permutation.rows // block_rows,)](
        tokens.contiguous(), permutation.row_of_choice, permutation.source, permutation.tile_expert, out,
        width, choices, width // kv_heads, permutation.tile, block_rows, columns, num_warps=WARPS,
    )  # fmt: skip
    return out


def plain_to_tokens(rows: Tensor, permutation: Permutation, kv_heads: int) -> Tensor:
    """The reference, in torch's operations."""
    by_choice = rows[permutation.row_of_choice.long()]
    return by_choice.unflatten(-1, (kv_heads, -1)).transpose(1, 2).flatten(1)


def plain_to_rows(tokens: Tensor, permutation: Permutation, kv_heads: int) -> Tensor:
    """The reference, in torch's operations."""
    choices = permutation.row_of_choice.shape[1]
    by_choice = tokens.unflatten(-1, (kv_heads, choices, -1)).transpose(1, 2).flatten(2)
    rows = tokens.new_zeros(permutation.rows, by_choice.shape[-1])
    return rows.index_put((permutation.row_of_choice.long(),), by_choice)
