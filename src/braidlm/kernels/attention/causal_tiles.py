"""Attention for routed queries tile by tile: what all kernels share (tiles, the masks), and the gradients.

One kernel computes those of the queries, another those of keys and values and writes zeros for queries that are not
routed. Both rotate gradients back where queries and keys were rotated, and sum them over tokens, for the bias of the
layer that computed queries, keys and values.

Both need, for each row and head, the dot product `delta` of the output and its gradient. The kernel of the queries runs
first and stores it; it also stores the queries as sorted rows, which the kernel of the keys reads for every tile of
keys without looking up their sources.
"""

from dataclasses import dataclass

from braidlm.kernels.attention.split_heads import rotated_back
from braidlm.kernels.optional_triton import tl, triton

SCAN = 1024
"""Rows scanned at once for the first that attends to a tile of keys."""


@dataclass(frozen=True)
class Tile:
    """A program's queries and keys, and its launch options."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """The arguments of a launch."""
        return {"QUERIES": self.queries, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels."""

    attend: Tile
    query_gradient: Tile
    key_gradient: Tile


TILES = {
    2: Tiles(attend=Tile(64, 64, 4, 3), query_gradient=Tile(64, 32, 4, 3), key_gradient=Tile(32, 64, 4, 1)),
    4: Tiles(attend=Tile(32, 32, 4, 2), query_gradient=Tile(32, 32, 4, 2), key_gradient=Tile(32, 32, 4, 2)),
}
"""By bytes of an element; tuned for heads of 64 on an H200."""


@triton.jit
def part_of_program(sequence_offsets, batch, blocks, heads):  # type: ignore[no-untyped-def]
    """Block, sequence and head of a program, and the first and last of its rows; neighbouring programs read
    neighbouring heads."""
    index = tl.program_id(0)
    block, sequence = (index // heads) % blocks, index // (heads * blocks)
    offset = sequence_offsets + block * (batch + 1) + sequence
    return block, sequence, index % heads, tl.load(offset), tl.load(offset + 1)


@triton.jit
def load_keys(  # type: ignore[no-untyped-def]
    keys, values, start, end, stride, DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr
):
    """The indices of a tile of keys, the keys and their values."""
    key = start + tl.arange(0, KEYS)
    offsets = key[:, None] * stride + tl.arange(0, DIM)[None, :]
    if MASKED:
        k = tl.load(keys + offsets, mask=(key < end)[:, None], other=0.0)
        v = tl.load(values + offsets, mask=(key < end)[:, None], other=0.0)
    else:
        k = tl.load(keys + offsets)
        v = tl.load(values + offsets)
    return key, k, v


@triton.jit
def keep_mask(step, offset, key, THRESHOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The dropout keep mask of two random words per row and a key, as tensors that broadcast."""
    x = step * key.to(tl.uint32) + offset
    x = (x ^ (x >> 16)) * (offset | 1)
    return x >= tl.full([1, 1], THRESHOLD, tl.uint32)


@triton.jit
def key_range(source, begin, end, origin, KEYS: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """For rows begin..end: the first key, the first that needs a mask, and the end of the keys."""
    earliest = tl.load(source + begin) - origin
    latest = tl.load(source + end - 1) - origin
    if WINDOW > 0:
        lowest = tl.maximum(earliest - WINDOW + 1, 0)
        masked = lowest
    else:
        lowest = 0
        masked = (earliest + 1) // KEYS * KEYS
    return lowest, masked, latest + 1


@triton.jit
def is_visible(key, position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    visible = key <= position
    if WINDOW > 0:
        visible = visible & (key > position - WINDOW)
    return visible


@triton.jit
def _load_words(words, rows, offsets, mask):  # type: ignore[no-untyped-def]
    step = tl.load(words + offsets, mask=mask, other=0).to(tl.uint32, bitcast=True)
    offset = tl.load(words + rows + offsets, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return step, offset


@triton.jit
def _query_gradient_of_keys(  # type: ignore[no-untyped-def]
    gradient, query, upstream, lse, delta, position, step, offset, keys, values, stride, begin, end, scale, keep_scale,
    DIM: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        key, k, v = load_keys(keys, values, start, end, stride, DIM, KEYS, MASKED)
        score = tl.dot(query, tl.trans(k), input_precision="ieee")
        weight_gradient = tl.dot(upstream, tl.trans(v), input_precision="ieee")
        weight = tl.exp2(score * scale - lse[:, None])
        if MASKED:
            weight = tl.where(is_visible(key[None, :], position[:, None], WINDOW), weight, 0.0)
        if THRESHOLD > 0:
            keep = keep_mask(step[:, None], offset[:, None], key[None, :], THRESHOLD)
            weight_gradient = tl.where(keep, weight_gradient, 0.0) * keep_scale
        score_gradient = weight * (weight_gradient - delta[:, None])
        gradient = tl.dot(score_gradient.to(k.dtype), k, gradient, input_precision="ieee")
    return gradient


@triton.jit
def query_gradient(  # type: ignore[no-untyped-def]
    qkv, source, sequence_offsets, out, upstream, lse, words, delta, queries, gradient, sums, cos, sin, index,
    rows, time, batch, blocks, heads, scale, plain_scale, keep_scale, sums_per_sequence,
    INTERLEAVED: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of rows, counted from the last."""
    tile = tl.program_id(1)
    block, sequence, head, first, last = part_of_program(sequence_offsets, batch, blocks, heads)
    width, stride = heads * DIM, blocks * 3 * heads * DIM
    begin = first + (tl.cdiv(last - first, QUERIES) - 1 - tile) * QUERIES
    total = tl.zeros([DIM], tl.float32)
    if begin >= first:
        origin = sequence * time
        row = begin + tl.arange(0, QUERIES)
        mask = row < last
        channel = tl.arange(0, DIM)[None, :]
        position = tl.load(source + row, mask=mask, other=origin - 1) - origin
        start = origin.to(tl.int64) * stride + (block * 3 * heads + head) * DIM
        query_offsets = start + position[:, None] * stride + channel
        query = tl.load(qkv + query_offsets, mask=mask[:, None], other=0.0)
        offsets = row.to(tl.int64)[:, None] * width + head * DIM + channel
        row_upstream = tl.load(upstream + offsets, mask=mask[:, None], other=0.0)
        tl.store(queries + offsets, query, mask=mask[:, None])
        attended = tl.load(out + offsets, mask=mask[:, None], other=0.0)
        row_delta = tl.sum(attended.to(tl.float32) * row_upstream.to(tl.float32), 1)
        tl.store(delta + head * rows + row, row_delta, mask=mask)
        row_lse = tl.load(lse + head * rows + row, mask=mask, other=float("inf"))
        step, offset = 0, 0
        if THRESHOLD > 0:
            step, offset = _load_words(words, rows, 2 * head * rows + row, mask)

        query_sum = tl.zeros([QUERIES, DIM], tl.float32)
        lowest, masked, end = key_range(source, begin, tl.minimum(begin + QUERIES, last), origin, KEYS, WINDOW)
        keys, values = qkv + start + width, qkv + start + 2 * width
        if WINDOW == 0:
            query_sum = _query_gradient_of_keys(
                query_sum, query, row_upstream, row_lse, row_delta, position, step, offset, keys, values, stride,
                lowest, masked, scale, keep_scale, DIM, KEYS, STAGES, False, WINDOW, THRESHOLD,
            )  # fmt: skip
        query_sum = _query_gradient_of_keys(
            query_sum, query, row_upstream, row_lse, row_delta, position, step, offset, keys, values, stride, masked,
            end, scale, keep_scale, DIM, KEYS, STAGES, True, WINDOW, THRESHOLD,
        )  # fmt: skip
        query_sum *= plain_scale
        if cos is not None:
            query_sum = rotated_back(
                query_sum, cos, sin, index, origin + position, mask, time, QUERIES, DIM, INTERLEAVED
            )  # fmt: skip
        tl.store(gradient + query_offsets, query_sum.to(gradient.dtype.element_ty), mask=mask[:, None])
        total = tl.sum(tl.where(mask[:, None], query_sum, 0.0), 0)
    if sums is not None:
        sums += (sequence * sums_per_sequence + tile) * stride + (block * 3 * heads + head) * DIM
        tl.store(sums + tl.arange(0, DIM), total)


@triton.jit
def _key_gradient_of_rows(  # type: ignore[no-untyped-def]
    key_gradient, value_gradient, k, v, key, queries, source, upstream, lse, delta, words, rows, origin, width,
    begin, end, count, scale, keep_scale,
    DIM: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, DIM)[None, :]
    for start in tl.range(begin, end, QUERIES, num_stages=STAGES):
        row = start + tl.arange(0, QUERIES)
        mask = row < count
        offsets = row[:, None] * width + channel
        query = tl.load(queries + offsets, mask=mask[:, None], other=0.0)
        row_upstream = tl.load(upstream + offsets, mask=mask[:, None], other=0.0)
        row_lse = tl.load(lse + row, mask=mask, other=float("inf"))  # so that missing rows have weights of 0
        row_delta = tl.load(delta + row, mask=mask, other=0.0)
        score = tl.dot(k, tl.trans(query), input_precision="ieee")
        weight = tl.exp2(score * scale - row_lse[None, :])
        if MASKED:
            position = tl.load(source + row, mask=mask, other=origin) - origin
            weight = tl.where(is_visible(key[:, None], position[None, :], WINDOW), weight, 0.0)
        weight_gradient = tl.dot(v, tl.trans(row_upstream), input_precision="ieee")
        dropped_weight = weight
        if THRESHOLD > 0:
            step, offset = _load_words(words, rows, row, mask)
            keep = keep_mask(step[None, :], offset[None, :], key[:, None], THRESHOLD)
            dropped_weight = tl.where(keep, weight, 0.0)
            weight_gradient = tl.where(keep, weight_gradient, 0.0) * keep_scale
        value_gradient = tl.dot(
            dropped_weight.to(row_upstream.dtype), row_upstream, value_gradient, input_precision="ieee"
        )
        score_gradient = weight * (weight_gradient - row_delta[None, :])
        key_gradient = tl.dot(score_gradient.to(query.dtype), query, key_gradient, input_precision="ieee")
    return key_gradient, value_gradient


@triton.jit
def key_gradient(  # type: ignore[no-untyped-def]
    qkv, source, sequence_offsets, routed, upstream, lse, words, delta, queries, gradient, sums, cos, sin, index,
    rows, time, batch, blocks, heads, scale, plain_scale, keep_scale, sums_per_sequence,
    INTERLEAVED: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
    SCAN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of keys, counted from the first."""
    tile = tl.program_id(1)
    block, sequence, head, first, last = part_of_program(sequence_offsets, batch, blocks, heads)
    width, stride = heads * DIM, blocks * 3 * heads * DIM
    origin = sequence * time
    earliest = tile * KEYS  # early keys have the most queries: they go first
    key = earliest + tl.arange(0, KEYS)
    mask = key < time
    channel = tl.arange(0, DIM)[None, :]
    start = origin.to(tl.int64) * stride + (block * 3 * heads + head) * DIM
    offsets = start + key[:, None] * stride + channel
    k = tl.load(qkv + offsets + width, mask=mask[:, None], other=0.0)
    v = tl.load(qkv + offsets + 2 * width, mask=mask[:, None], other=0.0)
    is_routed = tl.load(routed + (origin + key).to(tl.int64) * blocks + block, mask=mask, other=1)

    source += first  # from here on, rows count from this sequence's first
    upstream += first.to(tl.int64) * width + head * DIM
    queries += first.to(tl.int64) * width + head * DIM
    lse += head * rows + first
    delta += head * rows + first
    if THRESHOLD > 0:
        words += 2 * head * rows + first
    count = last - first
    begin = 0  # of the rows that attend to any of these keys
    unmasked = 0  # of those that attend to all
    end = 0
    for scanned in range(0, count, SCAN):
        row = scanned + tl.arange(0, SCAN)
        position = tl.load(source + row, mask=row < count, other=origin + time + KEYS + WINDOW) - origin
        begin += tl.sum((position < earliest).to(tl.int32), 0)
        unmasked += tl.sum((position < earliest + KEYS - 1).to(tl.int32), 0)
        if WINDOW > 0:
            end += tl.sum((position < earliest + KEYS - 1 + WINDOW).to(tl.int32), 0)
    if WINDOW > 0:
        unmasked = end
    else:
        unmasked = begin + tl.cdiv(unmasked - begin, QUERIES) * QUERIES

    key_sum = tl.zeros([KEYS, DIM], tl.float32)
    value_sum = tl.zeros([KEYS, DIM], tl.float32)
    key_sum, value_sum = _key_gradient_of_rows(
        key_sum, value_sum, k, v, key, queries, source, upstream, lse, delta, words, rows, origin, width,
        begin, unmasked, count, scale, keep_scale, DIM, QUERIES, STAGES, True, WINDOW, THRESHOLD,
    )  # fmt: skip
    if WINDOW == 0:
        key_sum, value_sum = _key_gradient_of_rows(
            key_sum, value_sum, k, v, key, queries, source, upstream, lse, delta, words, rows, origin, width,
            unmasked, count, count, scale, keep_scale, DIM, QUERIES, STAGES, False, WINDOW, THRESHOLD,
        )  # fmt: skip

    dtype = gradient.dtype.element_ty
    key_sum *= plain_scale
    value_sum *= keep_scale
    if cos is not None:
        key_sum = rotated_back(key_sum, cos, sin, index, origin + key, mask, time, KEYS, DIM, INTERLEAVED)
    tl.store(gradient + offsets + width, key_sum.to(dtype), mask=mask[:, None])
    tl.store(gradient + offsets + 2 * width, value_sum.to(dtype), mask=mask[:, None])
    if sums is not None:  # keys beyond the end of the sequence contribute 0
        sums += (sequence * sums_per_sequence + tile) * stride + (block * 3 * heads + head) * DIM
        tl.store(sums + width + tl.arange(0, DIM), tl.sum(key_sum, 0))
        tl.store(sums + 2 * width + tl.arange(0, DIM), tl.sum(value_sum, 0))
    tl.store(gradient + offsets, tl.zeros([KEYS, DIM], dtype), mask=(is_routed == 0)[:, None])
