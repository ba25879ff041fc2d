"""Splitting one product into queries, keys and values, and backward merging their gradients into one tensor.

Queries and keys are rotated by rotary positions, and gradients are rotated back; the backward pass also sums the
gradient of the product's bias. A kernel holds the first channels of all pairs and the second ones as two tiles: so
nothing is read twice or exchanged between threads. The tables are as `RotaryPositions` has them: the cosine of both
channels of a pair is the same, and the sine of the second is that of the first with the other sign, so that only those
of the first are read.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.launch import programs_for
from braidlm.kernels.optional_triton import tl, triton

Rotary = tuple[Tensor, Tensor, Tensor | None]
"""Cosine and signed sine [position, dim], and [rows] the position of each row, or None where that is its place in its
sequence.
"""

ROTATED_ROWS, ROTATED_HEADS, WARPS = 8, 4, 4
"""The rows and heads of a program that rotates, and its warps."""
ROWS, HEADS = 4, 8
"""The rows and heads of a tile of a program that merges. With eight heads, threads sum their own rows."""
PROGRAMS_PER_SM = 8
"""A maximum: each program that merges writes partial sums, so it should have some rows to sum."""


@triton.jit
def pairs_of_head(PAIRS: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the second channel of each pair, and which pairs there are."""
    pair = tl.arange(0, PAIRS)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + DIM // 2
    return first, second, pair < DIM // 2


@triton.jit
def table_offsets(index, row, mask, time, first, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the tables have the pairs whose first channels are given, for rows counted over all sequences.

    Load them in the shape of what they rotate: a smaller one would be exchanged between threads, which costs more.
    """
    if index is None:
        position = row % time
    else:
        position = tl.load(index + row, mask=mask, other=0)
    return position * DIM + first


@triton.jit
def rotated_pairs(first, second, cos, sin):  # type: ignore[no-untyped-def]
    """Both channels of each pair after the rotation; with the sine's other sign, of their gradients back."""
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def rotated_back(  # type: ignore[no-untyped-def]
    x, cos, sin, index, row, mask, time, ROWS: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Gradients [rows, channels] of rotated heads as those of the heads before; the channels are a power of two."""
    if INTERLEAVED:
        pairs = tl.reshape(x, [ROWS, DIM // 2, 2])
    else:
        pairs = tl.permute(tl.reshape(x, [ROWS, 2, DIM // 2]), (0, 2, 1))
    a, b = tl.split(pairs)
    first, _, _ = pairs_of_head(DIM // 2, DIM, INTERLEAVED)
    angle = table_offsets(index, row[:, None], mask[:, None], time, first[None, :], DIM)
    c, s = tl.load(cos + angle, mask=mask[:, None], other=0.0), tl.load(sin + angle, mask=mask[:, None], other=0.0)
    a, b = rotated_pairs(a, b, c, -s)
    pairs = tl.join(a, b)
    if not INTERLEAVED:
        pairs = tl.permute(pairs, (0, 2, 1))
    return tl.reshape(pairs, [ROWS, DIM])


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    source, cos, sin, index, target, rows, time, heads, source_heads, target_heads, INTERLEAVED: tl.constexpr,
    DIM: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[None, :, None]
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None, None]
    first, second, pair_mask = pairs_of_head(PAIRS, DIM, INTERLEAVED)
    first, second, mask = first[None, None, :], second[None, None, :], (row < rows) & (head < heads)
    mask = mask & pair_mask[None, None, :]
    angle = tl.broadcast_to(table_offsets(index, row, row < rows, time, first, DIM), [ROWS, HEADS, PAIRS])
    c, s = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)
    source += (row.to(tl.int64) * source_heads + head) * DIM
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    a, b = rotated_pairs(a, b, c, s)
    target += (row.to(tl.int64) * target_heads + head) * DIM
    tl.store(target + first, a.to(target.dtype.element_ty), mask=mask)
    tl.store(target + second, b.to(target.dtype.element_ty), mask=mask)


def rotate_heads(source: Tensor, target: Tensor, heads: int, rotary: Rotary, interleaved: bool) -> None:
    """Write the first `heads` of source [batch, time, heads, dim], rotated, as those of target; both may be one."""
    time, source_heads, dim = source.shape[1:]
    rows = len(source) * time
    assert source.is_contiguous()
    assert target.is_contiguous()
    _rotate_heads[(triton.cdiv(heads, ROTATED_HEADS), triton.cdiv(rows, ROTATED_ROWS))](
        source, *rotary, target, rows, time, heads, source_heads, target.shape[2], interleaved, dim,
        triton.next_power_of_2(dim // 2), ROTATED_ROWS, ROTATED_HEADS, num_warps=WARPS,
    )  # fmt: skip


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
        ctx: Any, qkv: Tensor, bias: Tensor | None, rotary: Rotary | None, interleaved: bool, kv_heads: int,
        sums: ColumnSums, slot: GradientSlot | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
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
