"""Splitting one product into queries, keys and values, and backward merging their gradients into one tensor.

Queries and keys are rotated by rotary positions; the backward pass also sums the gradient of the product's bias.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.attention.rotary import Rotary, pairs_of_head, rotate_heads, rotated_pairs, table_offsets
from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.launch import programs_for
from braidlm.kernels.optional_triton import tl, triton

ROWS, HEADS, WARPS = 4, 8, 4
"""A program that merges: its tile's rows and heads, and its warps. With eight heads, threads sum their own rows."""
PROGRAMS_PER_SM = 8
"""A maximum: each program writes partial sums, so it should have some rows to sum."""


@triton.jit
def _merge_group(  # type: ignore[no-untyped-def]
    source, batch_stride, head_stride, time_stride, cos, sin, index, merged, sums, rows, time, heads, group,
    source_heads, first_head, INTERLEAVED: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads of queries, keys or values; `first_head` is where their heads begin in what is merged.

    Where nothing is rotated, all channels are the first of their pairs.
    """
    ROTATED: tl.constexpr = cos is not None
    WIDTH: tl.constexpr = PAIRS if ROTATED else CHANNELS
    program, programs = tl.program_id(1), tl.num_programs(1)
    head = group * HEADS + tl.arange(0, HEADS)
    if ROTATED:
        first, second, first_mask = pairs_of_head(PAIRS, DIM, INTERLEAVED)
    else:
        first = tl.arange(0, CHANNELS)
        first_mask = first < DIM
    sums_mask = (head < source_heads)[:, None] & first_mask[None, :]
    source += head[None, :, None].to(tl.int64) * head_stride
    total = tl.zeros([ROWS, HEADS, WIDTH], tl.float32)
    second_total = tl.zeros([ROWS, HEADS, WIDTH], tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None, None]
        mask = (row < rows) & sums_mask[None, :, :]
        start = source + (row // time).to(tl.int64) * batch_stride + (row % time).to(tl.int64) * time_stride
        target = merged + (row.to(tl.int64) * heads + first_head + head[None, :, None]) * DIM
        x = tl.load(start + first[None, None, :], mask=mask, other=0.0).to(tl.float32)
        if ROTATED:
            y = tl.load(start + second[None, None, :], mask=mask, other=0.0).to(tl.float32)
            angle = table_offsets(index, row, row < rows, time, first[None, None, :], DIM)
            angle = tl.broadcast_to(angle, [ROWS, HEADS, WIDTH])
            c, s = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)
            x, y = rotated_pairs(x, y, c, -s)
            tl.store(target + second[None, None, :], y.to(merged.dtype.element_ty), mask=mask)
            second_total += y
        tl.store(target + first[None, None, :], x.to(merged.dtype.element_ty), mask=mask)
        total += x
    if sums is not None:
        sums += (program * heads + first_head + head[:, None]) * DIM
        tl.store(sums + first[None, :], tl.sum(total, 0), mask=sums_mask)
        if ROTATED:
            tl.store(sums + second[None, :], tl.sum(second_total, 0), mask=sums_mask)


@triton.jit
def _merge_heads(  # type: ignore[no-untyped-def]
    query, key, value, query_batch, query_head, query_time, key_batch, key_head, key_time, value_batch, value_head,
    value_time, cos, sin, index, merged, sums, rows, time, query_heads, key_heads, INTERLEAVED: tl.constexpr,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    heads = query_heads + 2 * key_heads
    key_group = tl.cdiv(query_heads, HEADS)
    value_group = key_group + tl.cdiv(key_heads, HEADS)
    if group < key_group:
        _merge_group(
            query, query_batch, query_head, query_time, cos, sin, index, merged, sums, rows, time, heads, group,
            query_heads, 0, INTERLEAVED, DIM, CHANNELS, PAIRS, ROWS, HEADS,
        )  # fmt: skip
    elif group < value_group:
        _merge_group(
            key, key_batch, key_head, key_time, cos, sin, index, merged, sums, rows, time, heads, group - key_group,
            key_heads, query_heads, INTERLEAVED, DIM, CHANNELS, PAIRS, ROWS, HEADS,
        )  # fmt: skip
    else:
        _merge_group(
            value, value_batch, value_head, value_time, None, None, None, merged, sums, rows, time, heads,
            group - value_group, key_heads, query_heads + key_heads, INTERLEAVED, DIM, CHANNELS, PAIRS, ROWS, HEADS,
        )  # fmt: skip


class SplitHeads(torch.autograd.Function):
    """qkv [batch, time, heads, dim] -> queries, keys, values [batch, their heads, time, dim].

    `bias` [heads * dim] is already part of qkv; it is an input for the sake of its gradient. `slot` belongs to the
    layer that computed qkv.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        rotary: Rotary | None,
        interleaved: bool,
        kv_heads: int,
        sums: ColumnSums,
        slot: GradientSlot | None,
    ) -> tuple[Tensor, ...]:
        query_heads = qkv.shape[2] - 2 * kv_heads
        query_key, value = qkv.split((query_heads + kv_heads, kv_heads), dim=2)
        if rotary is not None:
            query_key = torch.empty(query_key.shape, dtype=qkv.dtype, device=qkv.device)
            rotate_heads(qkv, query_key, query_heads + kv_heads, rotary, interleaved)
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
        rows, query_heads = batch * time, heads - 2 * ctx.kv_heads
        groups = triton.cdiv(query_heads, HEADS) + 2 * triton.cdiv(ctx.kv_heads, HEADS)
        programs = programs_for(query.device, PROGRAMS_PER_SM, triton.cdiv(rows, ROWS), groups)
        sums = ctx.sums.buffer(programs, heads * dim, query.device) if ctx.biased else None
        rotary = ctx.rotary or (None, None, None)
        strides = [s for g in (query, key, value) for s in g.stride()[:3]]
        _merge_heads[(groups, programs)](
            query, key, value, *strides, *rotary, merged, sums, rows, time, query_heads, ctx.kv_heads, ctx.interleaved,
            dim, triton.next_power_of_2(dim), triton.next_power_of_2(dim // 2), ROWS, HEADS, num_warps=WARPS,
        )  # fmt: skip
        return merged, None if sums is None else ctx.sums.total(), *[None] * 5


def plain_split_heads(qkv: Tensor, rotary: Rotary | None, interleaved: bool, kv_heads: int) -> tuple[Tensor, ...]:
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
