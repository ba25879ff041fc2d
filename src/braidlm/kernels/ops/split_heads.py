"""Queries, keys and values out of one product and, backward, their gradients side by side into one.

Rotary positions turn queries and keys on the way; the pass backward also sums the gradient of the product's bias.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import Sums
from braidlm.kernels.ops.launching import programs_for

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

ROWS, WARPS = 64, 4
PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _partner(channel, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    if INTERLEAVED:
        other = channel ^ 1
    else:
        other = tl.where(channel < DIM // 2, channel + DIM // 2, channel - DIM // 2)
    return other


@triton.jit
def _turn_heads(  # type: ignore[no-untyped-def]
    qkv, cos, sin, turned, rows, time, heads, turned_heads, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = (row < rows) & (channel < DIM)
    start = qkv + (row.to(tl.int64) * heads + head) * DIM
    angle = (row % time) * DIM + channel
    x = tl.load(start + channel, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(start + _partner(channel, DIM, INTERLEAVED), mask=inside, other=0.0).to(tl.float32)
    x = x * tl.load(cos + angle, mask=inside, other=0.0) + partner * tl.load(sin + angle, mask=inside, other=0.0)
    offsets = (row.to(tl.int64) * turned_heads + head) * DIM + channel
    tl.store(turned + offsets, x.to(turned.dtype.element_ty), mask=inside)


@triton.jit
def _merge_head(  # type: ignore[no-untyped-def]
    source, batch_stride, time_stride, cos, sin, merged, sums, rows, time, heads, head,
    INTERLEAVED: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(1), tl.num_programs(1)
    channel = tl.arange(0, CHANNELS)[None, :]
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (channel < DIM)
        start = source + (row // time).to(tl.int64) * batch_stride + (row % time).to(tl.int64) * time_stride
        x = tl.load(start + channel, mask=inside, other=0.0).to(tl.float32)
        if cos is not None:
            angle = (row % time) * DIM
            partner = _partner(channel, DIM, INTERLEAVED)
            x = x * tl.load(cos + angle + channel, mask=inside, other=0.0)
            turned = tl.load(start + partner, mask=inside, other=0.0).to(tl.float32)
            x += turned * tl.load(sin + angle + partner, mask=inside, other=0.0)
        if sums is not None:
            total += x
        offsets = (row.to(tl.int64) * heads + head) * DIM + channel
        tl.store(merged + offsets, x.to(merged.dtype.element_ty), mask=inside)
    if sums is not None:
        channel = tl.arange(0, CHANNELS)
        tl.store(sums + (program * heads + head) * DIM + channel, tl.sum(total, 0), mask=channel < DIM)


@triton.jit
def _merge_heads(  # type: ignore[no-untyped-def]
    query, key, value, query_batch, query_head, query_time, key_batch, key_head, key_time, value_batch, value_head,
    value_time, cos, sin, merged, sums, rows, time, query_heads, key_heads,
    INTERLEAVED: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    heads = query_heads + 2 * key_heads
    if head < query_heads:
        _merge_head(
            query + head * query_head, query_batch, query_time, cos, sin, merged, sums, rows, time, heads, head,
            INTERLEAVED, DIM, CHANNELS, ROWS,
        )  # fmt: skip
    elif head < query_heads + key_heads:
        _merge_head(
            key + (head - query_heads) * key_head, key_batch, key_time, cos, sin, merged, sums, rows, time, heads, head,
            INTERLEAVED, DIM, CHANNELS, ROWS,
        )  # fmt: skip
    else:
        _merge_head(
            value + (head - query_heads - key_heads) * value_head, value_batch, value_time, None, None, merged, sums,
            rows, time, heads, head, INTERLEAVED, DIM, CHANNELS, ROWS,
        )  # fmt: skip


class SplitHeads(torch.autograd.Function):
    """qkv [batch, time, heads, dim] -> queries, keys, values [batch, their heads, time, dim].

    `bias` [heads * dim] is in qkv already; it comes here for its gradient, and `slot` is of the layer
    that made qkv. `turn` is (cos, sin) [time, dim], or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        turn: tuple[Tensor, Tensor] | None,
        interleaved: bool,
        kv_heads: int,
        sums: Sums,
        slot: GradientSlot | None,
    ) -> tuple[Tensor, ...]:
        batch, time, heads, dim = qkv.shape
        query_heads = heads - 2 * kv_heads
        both, value = qkv.split((query_heads + kv_heads, kv_heads), dim=2)
        if turn is not None:
            both = torch.empty(both.shape, dtype=qkv.dtype, device=qkv.device)
            rows, channels = batch * time, triton.next_power_of_2(dim)
            _turn_heads[(both.shape[2], triton.cdiv(rows, ROWS))](
                qkv, *turn, both, rows, time, heads, both.shape[2], interleaved, dim, channels, ROWS, num_warps=WARPS
            )
        ctx.turn, ctx.interleaved, ctx.kv_heads, ctx.sums, ctx.shape = turn, interleaved, kv_heads, sums, qkv.shape
        ctx.slot = slot
        ctx.biased = bias is not None
        query, key = both.split((query_heads, kv_heads), dim=2)
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
        tiles = heads * triton.cdiv(rows, ROWS)
        programs = max(1, programs_for(query.device, PROGRAMS_PER_PROCESSOR, tiles) // heads)
        sums = None
        if ctx.biased:
            sums = ctx.sums.buffer(programs, heads * dim, query.device)
        cos, sin = ctx.turn or (None, None)
        strides = [s for g in (query, key, value) for s in g.stride()[:3]]
        _merge_heads[(heads, programs)](
            query, key, value, *strides, cos, sin, merged, sums, rows, time, heads - 2 * ctx.kv_heads, ctx.kv_heads,
            ctx.interleaved, dim, channels, ROWS, num_warps=WARPS,
        )  # fmt: skip
        return merged, None if sums is None else ctx.sums.total(), *[None] * 5


def plain_split_heads(
    qkv: Tensor, turn: tuple[Tensor, Tensor] | None, interleaved: bool, kv_heads: int
) -> tuple[Tensor, ...]:
    """The reference, in torch's operations."""
    both, value = qkv.split((qkv.shape[2] - kv_heads, kv_heads), dim=2)
    if turn is not None:
        cos, sin = (table[None, :, None] for table in turn)
        if interleaved:
            partner = both.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = both.roll(both.shape[-1] // 2, -1)
        both = both * cos + partner * sin
    query, key = both.split((both.shape[2] - kv_heads, kv_heads), dim=2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
