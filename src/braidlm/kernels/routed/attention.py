"""Causal attention of parallel blocks: every token has keys and values, only the routed ones have queries.

Queries are compacted: the rows of a block stand by sequence, then by time, so a tile of them needs no key later than
its last row, and no mask for keys that are not later than its first.

Dropout: each (head, row) draws two random words, which the pass backward finds again in memory; a hash of them and the
key decides. One draw for each key would cost several times the attention itself.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import Sums
from braidlm.kernels.routed.attention_gradients import SCAN, key_gradient, query_gradient
from braidlm.kernels.routed.attention_tiles import TILES, Tiles, is_kept, is_visible, key_range, part_of_program
from braidlm.kernels.routed.gradient_stacks import GroupedGradientSlot

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

LOG2_E = 1.4426950408889634
Queries = tuple[Tensor, Tensor, Tensor]
"""Source, begins and routed, as `AttendRouted` has them."""


@lru_cache(maxsize=8)  # else every step would make them again
def everyone(batch: int, time: int, device: torch.device) -> Queries:
    """Where one block serves all tokens."""
    source = torch.arange(batch * time, dtype=torch.int32, device=device)
    begins = torch.arange(0, batch * time + 1, time, dtype=torch.int32, device=device)[None]
    return source, begins, torch.ones(batch * time, 1, dtype=torch.uint8, device=device)


@triton.jit
def _attend_keys(  # type: ignore[no-untyped-def]
    mixed, total, peak, query, when, step, offset, keys, values, stride, begin, end, scale,
    DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, DIM)[None, :]
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        offsets = key[:, None] * stride + channel
        if MASKED:
            k = tl.load(keys + offsets, mask=(key < end)[:, None], other=0.0)
            v = tl.load(values + offsets, mask=(key < end)[:, None], other=0.0)
        else:
            k = tl.load(keys + offsets)
            v = tl.load(values + offsets)
        score = tl.dot(query, tl.trans(k), input_precision="ieee")
        if MASKED:
            score = tl.where(is_visible(key[None, :], when[:, None], WINDOW), score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        decay = tl.exp2(peak - higher)
        total = total * decay + tl.sum(weight, 1)
        if THRESHOLD > 0:
            weight = tl.where(is_kept(step[:, None], offset[:, None], key[None, :], THRESHOLD), weight, 0.0)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * decay[:, None], input_precision="ieee")
        peak = higher
    return mixed, total, peak


@triton.jit
def _clear_padding(  # type: ignore[no-untyped-def]
    out, begins, block, sequence, head, rows, batch, blocks, width, DIM: tl.constexpr, QUERIES: tl.constexpr
):
    """Zeros between this block's last row and the next block's first, all sequences' programs sharing them."""
    end = tl.load(begins + block * (batch + 1) + batch)
    following = tl.load(begins + (block + 1) * (batch + 1), mask=block + 1 < blocks, other=rows)
    channel = tl.arange(0, DIM)[None, :]
    for begin in range(end + sequence * QUERIES, following, batch * QUERIES):
        row = (begin + tl.arange(0, QUERIES))[:, None]
        offsets = row.to(tl.int64) * width + head * DIM + channel
        tl.store(out + offsets, tl.zeros([QUERIES, DIM], out.dtype.element_ty), mask=row < following)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv, source, begins, seed, out, lse, words, rows, time, batch, blocks, heads, scale, keep_scale,
    DIM: tl.constexpr, WINDOW: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, sequence, head = part_of_program(blocks, heads)
    width, stride = heads * DIM, blocks * 3 * heads * DIM
    if tl.program_id(1) == tl.num_programs(1) - 1:  # of a sequence's programs the one that most likely has no rows
        _clear_padding(out, begins, block, sequence, head, rows, batch, blocks, width, DIM, QUERIES)
    first = tl.load(begins + block * (batch + 1) + sequence)
    last = tl.load(begins + block * (batch + 1) + sequence + 1)
    begin = (
        first + (tl.cdiv(last - first, QUERIES) - 1 - tl.program_id(1)) * QUERIES
    )  # late rows see most: they go first
    if begin < first:
        return

    origin = sequence * time
    row = begin + tl.arange(0, QUERIES)
    inside = row < last
    channel = tl.arange(0, DIM)[None, :]
    when = tl.load(source + row, mask=inside, other=origin - 1) - origin
    start = qkv + origin.to(tl.int64) * stride + (block * 3 * heads + head) * DIM
    query = tl.load(start + when[:, None] * stride + channel, mask=inside[:, None], other=0.0)
    step, offset = 0, 0
    if THRESHOLD > 0:
        step, offset, _, _ = tl.randint4x(tl.load(seed), head * rows + row)
        at = 2 * head * rows + row
        tl.store(words + at, step.to(tl.int32, bitcast=True), mask=inside)
        tl.store(words + rows + at, offset.to(tl.int32, bitcast=True), mask=inside)

    mixed = tl.zeros([QUERIES, DIM], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], -1.0e30, tl.float32)  # finite: a row may see nothing of its first keys
    lowest, masked, end = key_range(source, begin, tl.minimum(begin + QUERIES, last), origin, KEYS, WINDOW)
    keys, values = start + width, start + 2 * width
    if WINDOW == 0:
        mixed, total, peak = _attend_keys(
            mixed, total, peak, query, when, step, offset, keys, values, stride, lowest, masked, scale,
            DIM, KEYS, False, WINDOW, THRESHOLD,
        )  # fmt: skip
    mixed, total, peak = _attend_keys(
        mixed, total, peak, query, when, step, offset, keys, values, stride, masked, end, scale,
        DIM, KEYS, True, WINDOW, THRESHOLD,
    )  # fmt: skip
    total = tl.where(inside, total, 1.0)
    mixed = mixed * (keep_scale / total)[:, None]
    offsets = row.to(tl.int64)[:, None] * width + head * DIM + channel
    tl.store(out + offsets, mixed.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + head * rows + row, peak + tl.log2(total), mask=inside)


class AttendRouted(torch.autograd.Function):
    """qkv [tokens, blocks, 3, heads, dim] -> what the routed tokens have mixed [rows, heads * dim]; padding is 0.

    `source` int32 [rows] is the token of each row, -1 for padding. `begins` int32 [blocks, batch + 1]: the rows of
    block p and sequence b are begins[p, b] .. begins[p, b + 1], in order of time. `routed` uint8 [tokens, blocks] is 1
    where a pair has a row. `seed` int64 [1] is read on the device, with dropout only. Dim is a power of two from 16 on.
    `bias` is in qkv already; it comes here for its gradient. `slot` is of the layer that made qkv, `out_slot` of
    the one that reads what comes out.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        source: Tensor,
        begins: Tensor,
        routed: Tensor,
        scale: float,
        dropout: float,
        seed: Tensor | None,
        window: int | None,
        tiles: Tiles | None = None,
        bias: Tensor | None = None,
        sums: Sums | None = None,
        slot: GradientSlot | None = None,
        out_slot: GroupedGradientSlot | None = None,
    ) -> Tensor:
        tokens, blocks, _, heads, dim = qkv.shape
        batch, rows = begins.shape[1] - 1, len(source)
        time = tokens // batch
        assert qkv.is_contiguous()
        assert source.dtype == begins.dtype == torch.int32
        assert routed.shape == (tokens, blocks)
        assert dim >= 16
        assert dim & (dim - 1) == 0
        assert scale > 0
        assert dropout == 0 or seed is not None
        tiles = tiles or TILES[qkv.element_size()]
        out = qkv.new_empty(rows, heads * dim) if out_slot is None else out_slot.input
        lse = qkv.new_empty(heads, rows, dtype=torch.float32)
        words = qkv.new_empty(heads, 2, rows, dtype=torch.int32) if dropout else None
        sizes = (rows, time, batch, blocks, heads)
        options = {
            "DIM": dim,
            "WINDOW": 0 if window is None or window >= time else window,
            "THRESHOLD": int(dropout * 2**32),
        }
        scales = (scale * LOG2_E, scale, 1 / (1 - dropout))
        _attend[(batch * blocks * heads, triton.cdiv(time, tiles.attend.queries))](
            qkv, source, begins, seed, out, lse, words, *sizes, scales[0], scales[2],
            **options, **tiles.attend.options,
        )  # fmt: skip
        ctx.save_for_backward(qkv, source, begins, routed, out, lse, words)
        ctx.sizes, ctx.scales, ctx.options, ctx.tiles = sizes, scales, options, tiles
        ctx.sums, ctx.slot = None if bias is None else sums or Sums(1), slot
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        qkv, source, begins, routed, out, lse, words = ctx.saved_tensors
        _, time, batch, blocks, heads = ctx.sizes
        upstream = upstream.contiguous()
        gradient = torch.empty_like(qkv) if ctx.slot is None else ctx.slot.gradient.view(qkv.shape)
        by_query, by_key, parts = ctx.tiles.query_gradient, ctx.tiles.key_gradient, batch * blocks * heads
        query_tiles, key_tiles = triton.cdiv(time, by_query.queries), triton.cdiv(time, by_key.keys)
        sums, slots = None, max(query_tiles, key_tiles)
        if ctx.sums is not None:
            sums = ctx.sums.buffer(batch * slots, qkv[0].numel(), qkv.device)
            if query_tiles != key_tiles:
                sums.zero_()
        delta, queries = torch.empty_like(lse), torch.empty_like(out)
        rest = (lse, words, delta, queries, gradient, sums, *ctx.sizes, *ctx.scales, slots)
        query_gradient[(parts, query_tiles)](
            qkv, source, begins, out, upstream, *rest, **ctx.options,
            QUERIES=by_query.queries, KEYS=by_query.keys, STAGES=by_query.stages, num_warps=by_query.warps,
        )  # fmt: skip
        key_gradient[(parts, key_tiles)](
            qkv, source, begins, routed, upstream, *rest, **ctx.options, SCAN=min(SCAN, triton.next_power_of_2(time)),
            QUERIES=by_key.queries, KEYS=by_key.keys, STAGES=by_key.stages, num_warps=by_key.warps,
        )  # fmt: skip
        return gradient, *[None] * 8, None if sums is None else ctx.sums.total(), *[None] * 3


def plain_attend_routed(qkv: Tensor, source: Tensor, begins: Tensor, scale: float, window: int | None) -> Tensor:
    """The reference, in torch's operations: every token asks every block, and the rows are picked from that."""
    batch, time = begins.shape[1] - 1, len(qkv) // (begins.shape[1] - 1)
    query, key, value = qkv.unflatten(0, (batch, time)).permute(3, 0, 2, 4, 1, 5)
    now = torch.arange(time, device=qkv.device)
    ago = now[:, None] - now
    visible = (ago >= 0) & (ago < (window or time))
    score = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    mixed_NPC = (score.softmax(-1) @ value).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2)
    row = torch.arange(len(source), dtype=torch.int32, device=qkv.device)
    block = torch.searchsorted(begins[:, 0].contiguous(), row, right=True) - 1
    return mixed_NPC[source.clamp_min(0), block] * (source >= 0)[:, None]
