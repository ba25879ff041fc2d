"""Causal attention of parallel blocks: every token has keys and values, only the routed ones have queries.

Queries are compacted: the rows of a block are sorted by sequence, then by time, so a tile of them needs no key later
than its last row, and no mask for keys that are not later than its first.

Dropout: each (head, row) draws two random words, which are stored for the backward pass; the keep mask is a hash of
them and the key. A draw for each key would cost several times the attention itself.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.attention.causal_tiles import (
    SCAN,
    TILES,
    Tiles,
    is_visible,
    keep_mask,
    key_gradient,
    key_range,
    load_keys,
    part_of_program,
    query_gradient,
)
from braidlm.kernels.attention.split_heads import Rotary, rotate_heads
from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.optional_triton import tl, triton

LOG2_E = 1.4426950408889634
Queries = tuple[Tensor, Tensor, Tensor]
"""Source, sequence offsets and routed, as in `AttendRouted`."""


@lru_cache(maxsize=8)  # else every step would compute them again
def all_queries(batch: int, time: int, device: torch.device) -> Queries:
    """The queries of one block that serves all tokens."""
    source = torch.arange(batch * time, dtype=torch.int32, device=device)
    sequence_offsets = torch.arange(0, batch * time + 1, time, dtype=torch.int32, device=device)[None]
    return source, sequence_offsets, torch.ones(batch * time, 1, dtype=torch.uint8, device=device)


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]
    acc, row_sum, row_max, query, position, step, offset, keys, values, stride, begin, end, scale,
    DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, KEYS):
        key, k, v = load_keys(keys, values, start, end, stride, DIM, KEYS, MASKED)
        score = tl.dot(query, tl.trans(k), input_precision="ieee")
        if MASKED:
            score = tl.where(is_visible(key[None, :], position[:, None], WINDOW), score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weight, 1)
        if THRESHOLD > 0:
            weight = tl.where(keep_mask(step[:, None], offset[:, None], key[None, :], THRESHOLD), weight, 0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def _clear_padding(  # type: ignore[no-untyped-def]
    out, sequence_offsets, block, sequence, head, rows, batch, blocks, width, DIM: tl.constexpr, QUERIES: tl.constexpr
):
    """Write zeros between this block's last row and the next block's first; all sequences' programs share them."""
    end = tl.load(sequence_offsets + block * (batch + 1) + batch)
    following = tl.load(sequence_offsets + (block + 1) * (batch + 1), mask=block + 1 < blocks, other=rows)
    channel = tl.arange(0, DIM)[None, :]
    for begin in range(end + sequence * QUERIES, following, batch * QUERIES):
        row = (begin + tl.arange(0, QUERIES))[:, None]
        offsets = row.to(tl.int64) * width + head * DIM + channel
        tl.store(out + offsets, tl.zeros([QUERIES, DIM], out.dtype.element_ty), mask=row < following)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv, source, sequence_offsets, seed, out, lse, words, rows, time, batch, blocks, heads, scale, keep_scale,
    DIM: tl.constexpr, WINDOW: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, sequence, head, first, last = part_of_program(sequence_offsets, batch, blocks, heads)
    width, stride = heads * DIM, blocks * 3 * heads * DIM
    if tl.program_id(1) == tl.num_programs(1) - 1:  # of a sequence's programs this one most likely has no rows
        _clear_padding(out, sequence_offsets, block, sequence, head, rows, batch, blocks, width, DIM, QUERIES)
    # Late rows attend to the most keys, so they go first.
    begin = first + (tl.cdiv(last - first, QUERIES) - 1 - tl.program_id(1)) * QUERIES
    if begin < first:
        return

    origin = sequence * time
    row = begin + tl.arange(0, QUERIES)
    mask = row < last
    channel = tl.arange(0, DIM)[None, :]
    position = tl.load(source + row, mask=mask, other=origin - 1) - origin
    start = qkv + origin.to(tl.int64) * stride + (block * 3 * heads + head) * DIM
    query = tl.load(start + position[:, None] * stride + channel, mask=mask[:, None], other=0.0)
    step, offset = 0, 0
    if THRESHOLD > 0:
        step, offset, _, _ = tl.randint4x(tl.load(seed), head * rows + row)
        at = 2 * head * rows + row
        tl.store(words + at, step.to(tl.int32, bitcast=True), mask=mask)
        tl.store(words + rows + at, offset.to(tl.int32, bitcast=True), mask=mask)

    acc = tl.zeros([QUERIES, DIM], tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    row_max = tl.full([QUERIES], -1.0e30, tl.float32)  # finite: all of a row's first keys may be masked
    lowest, masked, end = key_range(source, begin, tl.minimum(begin + QUERIES, last), origin, KEYS, WINDOW)
    keys, values = start + width, start + 2 * width
    if WINDOW == 0:
        acc, row_sum, row_max = _attend_keys(
            acc, row_sum, row_max, query, position, step, offset, keys, values, stride, lowest, masked, scale,
            DIM, KEYS, False, WINDOW, THRESHOLD,
        )  # fmt: skip
    acc, row_sum, row_max = _attend_keys(
        acc, row_sum, row_max, query, position, step, offset, keys, values, stride, masked, end, scale,
        DIM, KEYS, True, WINDOW, THRESHOLD,
    )  # fmt: skip
    row_sum = tl.where(mask, row_sum, 1.0)
    acc = acc * (keep_scale / row_sum)[:, None]
    offsets = row.to(tl.int64)[:, None] * width + head * DIM + channel
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask[:, None])
    tl.store(lse + head * rows + row, row_max + tl.log2(row_sum), mask=mask)


class AttendRouted(torch.autograd.Function):
    """qkv [tokens, blocks, 3, heads, dim] -> attention output of the routed tokens [rows, heads * dim]; padding is 0.

    `source` int32 [rows] is the token of each row, -1 for padding. `sequence_offsets` int32 [blocks, batch + 1]: the
    rows of block p and sequence b are those from [p, b] to [p, b + 1], in order of time. `routed` uint8 [tokens,
    blocks] is 1 where a pair has a row. `seed` int64 [1] is read on the device, with dropout only. Dim is a power of
    two from 16 on. `bias` is already part of qkv; it is an input for the sake of its gradient. `slot` belongs to the
    layer that computed qkv, `out_slot` to the layer that reads the output. With `rotary`, for one block only, queries
    and keys are rotated first, where they are: qkv is not what it was.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, source: Tensor, sequence_offsets: Tensor, routed: Tensor, scale: float, dropout: float,
        seed: Tensor | None, window: int | None, tiles: Tiles | None = None, bias: Tensor | None = None,
        sums: ColumnSums | None = None, slot: GradientSlot | None = None, out_slot: GradientSlot | None = None,
        rotary: Rotary | None = None, interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        tokens, blocks, _, heads, dim = qkv.shape
        batch, rows = sequence_offsets.shape[1] - 1, len(source)
        time = tokens // batch
        assert qkv.is_contiguous()
        assert source.dtype == sequence_offsets.dtype == torch.int32
        assert routed.shape == (tokens, blocks)
        assert dim >= 16
        assert dim & (dim - 1) == 0
        if rotary is not None:
            assert blocks == 1
            heads_BTHD = qkv.view(batch, time, 3 * heads, dim)
            rotate_heads(heads_BTHD, heads_BTHD, 2 * heads, rotary, interleaved)
        tiles = tiles or TILES[qkv.element_size()]
        out = qkv.new_empty(rows, heads * dim) if out_slot is None else out_slot.input
        lse = qkv.new_empty(heads, rows, dtype=torch.float32)
        words = qkv.new_empty(heads, 2, rows, dtype=torch.int32) if dropout else None
        sizes = (rows, time, batch, blocks, heads)
        seen = 0 if window is None or window >= time else window
        options = {"DIM": dim, "WINDOW": seen, "THRESHOLD": int(dropout * 2**32)}
        scales = (scale * LOG2_E, scale, 1 / (1 - dropout))
        _attend[(batch * blocks * heads, triton.cdiv(time, tiles.attend.queries))](
            qkv, source, sequence_offsets, seed, out, lse, words, *sizes, scales[0], scales[2],
            **options, **tiles.attend.options,
        )  # fmt: skip
        ctx.save_for_backward(qkv, source, sequence_offsets, routed, out, lse, words)
        ctx.sizes, ctx.scales, ctx.options, ctx.tiles = sizes, scales, options, tiles
        ctx.rotary, ctx.interleaved = rotary or (None, None, None), interleaved
        ctx.sums, ctx.slot = None if bias is None else sums or ColumnSums(1), slot
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        qkv, source, sequence_offsets, routed, out, lse, words = ctx.saved_tensors
        _, time, batch, blocks, heads = ctx.sizes
        upstream = upstream.contiguous()
        gradient = torch.empty_like(qkv) if ctx.slot is None else ctx.slot.gradient.view(qkv.shape)
        by_query, by_key, parts = ctx.tiles.query_gradient, ctx.tiles.key_gradient, batch * blocks * heads
        query_tiles, key_tiles = triton.cdiv(time, by_query.queries), triton.cdiv(time, by_key.keys)
        sums, sums_per_sequence = None, max(query_tiles, key_tiles)
        if ctx.sums is not None:
            sums = ctx.sums.buffer(batch * sums_per_sequence, qkv[0].numel(), qkv.device)
            if query_tiles != key_tiles:
                sums.zero_()
        delta, queries = torch.empty_like(lse), torch.empty_like(out)
        shared = (lse, words, delta, queries, gradient, sums, *ctx.rotary, *ctx.sizes, *ctx.scales)
        shared = (*shared, sums_per_sequence, ctx.interleaved)
        query_gradient[(parts, query_tiles)](
            qkv, source, sequence_offsets, out, upstream, *shared, **ctx.options,
            QUERIES=by_query.queries, KEYS=by_query.keys, STAGES=by_query.stages, num_warps=by_query.warps,
        )  # fmt: skip
        key_gradient[(parts, key_tiles)](
            qkv, source, sequence_offsets, routed, upstream, *shared, **ctx.options,
            SCAN=min(SCAN, triton.next_power_of_2(time)),
            QUERIES=by_key.queries, KEYS=by_key.keys, STAGES=by_key.stages, num_warps=by_key.warps,
        )  # fmt: skip
        return gradient, *[None] * 8, None if sums is None else ctx.sums.total(), *[None] * 5


def plain_attend_routed(
    qkv: Tensor, source: Tensor, sequence_offsets: Tensor, scale: float, window: int | None
) -> Tensor:
    """The reference, in torch's operations: every token has a query in every block, and rows are selected from that."""
    batch, time = sequence_offsets.shape[1] - 1, len(qkv) // (sequence_offsets.shape[1] - 1)
    query, key, value = qkv.unflatten(0, (batch, time)).permute(3, 0, 2, 4, 1, 5)
    position = torch.arange(time, device=qkv.device)
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < (window or time))
    score = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    attended_NPC = (score.softmax(-1) @ value).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2)
    row = torch.arange(len(source), dtype=torch.int32, device=qkv.device)
    block = torch.searchsorted(sequence_offsets[:, 0].contiguous(), row, right=True) - 1
    return attended_NPC[source.clamp_min(0), block] * (source >= 0)[:, None]
