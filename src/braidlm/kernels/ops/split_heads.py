"""Splitting one product into queries, keys and values, and backward merging their gradients into one tensor.

Queries and keys are rotated by rotary positions; the backward pass also sums the gradient of the product's bias.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.launch import programs_for

ROWS, HEADS, WARPS = 8, 8, 4
"""A program's rows and heads, which share what it reads of the tables of angles, and its warps."""
PROGRAMS_PER_SM = 8
"""A maximum, backward: each program writes partial sums, so it should have some rows to sum."""


@triton.jit
def _partner(channel, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    if INTERLEAVED:
        other = channel ^ 1
    else:
        other = tl.where(channel < DIM // 2, channel + DIM // 2, channel - DIM // 2)
    return other


@triton.jit
def _position(row, rows, time, index):  # type: ignore[no-untyped-def]
    if index is None:
        position = row % time
    else:
        position = tl.load(index + row, mask=row < rows, other=0)
    return position


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    qkv, cos, sin, index, rotated, rows, time, heads, rotated_heads, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[None, :, None]
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None, None]
    channel = tl.arange(0, CHANNELS)[None, None, :]
    row_mask = (row < rows) & (channel < DIM)
    mask = row_mask & (head < rotated_heads)
    start = qkv + (row.to(tl.int64) * heads + head) * DIM
    angle = _position(row, rows, time, index) * DIM + channel
    x = tl.load(start + channel, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(start + _partner(channel, DIM, INTERLEAVED), mask=mask, other=0.0).to(tl.float32)
    x = x * tl.load(cos + angle, mask=row_mask, other=0.0) + partner * tl.load(sin + angle, mask=row_mask, other=0.0)
    offsets = (row.to(tl.int64) * rotated_heads + head) * DIM + channel
    tl.store(rotated + offsets, x.to(rotated.dtype.element_ty), mask=mask)


@triton.jit
def _merge_group(  # type: ignore[no-untyped-def]
    source, batch_stride, head_stride, time_stride, cos, sin, index, merged, sums, rows, time, heads, group,
    source_heads, first_head, INTERLEAVED: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Of queries, keys or values: some heads of theirs; `first_head` is where their heads begin in what is merged."""
    program, programs = tl.program_id(1), tl.num_programs(1)
    head = (group * HEADS + tl.arange(0, HEADS))[None, :, None]
    channel = tl.arange(0, CHANNELS)[None, None, :]
    source += head.to(tl.int64) * head_stride
    total = tl.zeros([ROWS, HEADS, CHANNELS], tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None, None]
        row_mask = (row < rows) & (channel < DIM)
        mask = row_mask & (head < source_heads)
        start = source + (row // time).to(tl.int64) * batch_stride + (row % time).to(tl.int64) * time_stride
        x = tl.load(start + channel, mask=mask, other=0.0).to(tl.float32)
        if cos is not None:
            angle = _position(row, rows, time, index) * DIM
            partner = _partner(channel, DIM, INTERLEAVED)
            x = x * tl.load(cos + angle + channel, mask=row_mask, other=0.0)
            rotated = tl.load(start + partner, mask=mask, other=0.0).to(tl.float32)
            x += rotated * tl.load(sin + angle + partner, mask=row_mask, other=0.0)
        if sums is not None:
            total += x
        offsets = (row.to(tl.int64) * heads + first_head + head) * DIM + channel
        tl.store(merged + offsets, x.to(merged.dtype.element_ty), mask=mask)
    if sums is not None:
        head = (group * HEADS + tl.arange(0, HEADS))[:, None]
        channel = tl.arange(0, CHANNELS)[None, :]
        offsets = (program * heads + first_head + head) * DIM + channel
        tl.store(sums + offsets, tl.sum(total, 0), mask=(head < source_heads) & (channel < DIM))


@triton.jit
def _merge_heads(  # type: ignore[no-untyped-def]
    query, key, value, query_batch, query_head, query_time, key_batch, key_head, key_time, value_batch, value_head,
    value_time, cos, sin, index, merged, sums, rows, time, query_heads, key_heads,
    INTERLEAVED: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    heads = query_heads + 2 * key_heads
    key_group = tl.cdiv(query_heads, HEADS)
    value_group = key_group + tl.cdiv(key_heads, HEADS)
    if group < key_group:
        _merge_group(
            query, query_batch, query_head, query_time, cos, sin, index, merged, sums, rows, time, heads, group,
            query_heads, 0, INTERLEAVED, DIM, CHANNELS, ROWS, HEADS,
        )  # fmt: skip
    elif group < value_group:
        _merge_group(
            key, key_batch, key_head, key_time, cos, sin, index, merged, sums, rows, time, heads, group - key_group,
            key_heads, query_heads, INTERLEAVED, DIM, CHANNELS, ROWS, HEADS,
        )  # fmt: skip
    else:
        _merge_group(
            value, value_batch, value_head, value_time, None, None, None, merged, sums, rows, time, heads,
            group - value_group, key_heads, query_heads + key_heads, INTERLEAVED, DIM, CHANNELS, ROWS, HEADS,
        )  # fmt: skip


class SplitHeads(torch.autograd.Function):
    """qkv [batch, time, heads, dim] -> queries, keys, values [batch, their heads, time, dim].

    `bias` [heads * dim] is already part of qkv; it is an input for the sake of its gradient. `slot` belongs to the
    layer that computed qkv. `rotary` is None or (cos, sin, index): tables [position, dim], and [batch * time] the
    position of each token, or None where that is its place in its row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        rotary: tuple[Tensor, Tensor, Tensor | None] | None,
        interleaved: bool,
        kv_heads: int,
        sums: ColumnSums,
        slot: GradientSlot | None,
    ) -> tuple[Tensor, ...]:
        batch, time, heads, dim = qkv.shape
        query_heads = heads - 2 * kv_heads
        query_key, value = qkv.split((query_heads + kv_heads, kv_heads), dim=2)
        if rotary is not None:
            query_key = torch.empty(query_key.shape, dtype=qkv.dtype, device=qkv.device)
            rows, channels, rotated_heads = batch * time, triton.next_power_of_2(dim), query_key.shape[2]
            _rotate_heads[(triton.cdiv(rotated_heads, HEADS), triton.cdiv(rows, ROWS))](
                qkv, *rotary, query_key, rows, time, heads, rotated_heads, interleaved, dim, channels,
                ROWS, HEADS, num_warps=WARPS,
            )  # fmt: skip
        ctx.rotary, ctx.interleaved, ctx.kv_heads, ctx.shape = rotary, interleaved, kv_heads, qkv.shape
        ctx.sums, ctx.slot, ctx.biased = sums, slot, bias is not None
        query, key = query_key.split((query_heads, kv_heads), dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        batch, time, heads, dim = ctx.shape
        query, key, value = (g if g.stride(-1) == 1 else g.contiguous() for g in gradients)
        if ctx.slot is None:
            merged = torch.empty(ctx.shape, dtype=query.dtype, device=query.device)
        else:
            merged = ctx.slot.gradient.view(ctx.shape)
        rows, channels = batch * time, triton.next_power_of_2(dim)
        query_heads = heads - 2 * ctx.kv_heads
        groups = triton.cdiv(query_heads, HEADS) + 2 * triton.cdiv(ctx.kv_heads, HEADS)
        programs = programs_for(query.device, PROGRAMS_PER_SM, triton.cdiv(rows, ROWS), groups)
        sums = None
        if ctx.biased:
            sums = ctx.sums.buffer(programs, heads * dim, query.device)
        rotary = ctx.rotary or (None, None, None)
        strides = [s for g in (query, key, value) for s in g.stride()[:3]]
        _merge_heads[(groups, programs)](
            query, key, value, *strides, *rotary, merged, sums, rows, time, query_heads, ctx.kv_heads,
            ctx.interleaved, dim, channels, ROWS, HEADS, num_warps=WARPS,
        )  # fmt: skip
        return merged, None if sums is None else ctx.sums.total(), *[None] * 5


def plain_split_heads(
    qkv: Tensor, rotary: tuple[Tensor, Tensor, Tensor | None] | None, interleaved: bool, kv_heads: int
) -> tuple[Tensor, ...]:
    """The reference, in torch's operations."""
    query_key, value = qkv.split((qkv.shape[2] - kv_heads, kv_heads), dim=2)
    if rotary is not None:
        *tables, index = rotary
        tables = tables if index is None else [table[index] for table in tables]
        cos, sin = (table.view(-1, qkv.shape[1], 1, qkv.shape[3]) for table in tables)
        if interleaved:
            partner = query_key.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = query_key.roll(query_key.shape[-1] // 2, -1)
        query_key = query_key * cos + partner * sin
    query, key = query_key.split((query_key.shape[2] - kv_heads, kv_heads), dim=2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
