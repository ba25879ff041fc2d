"""Stick-breaking attention tile by tile: the sizes and the arithmetic that all kernels share, and the gradients.

With g = weight * (upstream . value), the gradient of key j's score is g_j - sigmoid(z_j) * (sum of g over j and earlier
keys). The kernel of the queries reads keys from the first to the last, and stores what the tiles before each one
sum to (`gathered`); that of the keys reads it, and so can take its queries in any order.
"""

from dataclasses import dataclass

from braidlm.kernels.optional_triton import tl, triton


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, the same in all kernels since one stores what another reads by tile, and the launch
    options of each kernel."""

    queries: int
    keys: int
    span: int
    """Tiles of keys after which the forward pass looks whether anything is left of the sticks."""
    attend: dict[str, int]
    query_gradient: dict[str, int]
    key_gradient: dict[str, int]


STAGES_1, STAGES_2, STAGES_3 = ({"num_warps": 4, "num_stages": stages} for stages in (1, 2, 3))
TILES = {
    2: Tiles(64, 32, 4, attend=STAGES_3, query_gradient=STAGES_1, key_gradient=STAGES_2),
    4: Tiles(32, 32, 2, attend=STAGES_2, query_gradient=STAGES_1, key_gradient=STAGES_1),
}
"""By bytes of an element; tuned for heads of 64 on an H200."""

LOG2_E = 1.4426950408889634
GONE = 100.0
"""Where less than 2^-100 of a stick is left, nothing reaches a result, and no further key is read."""


@triton.jit
def load_rows(base, row, stride, limit, DIM: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of DIM channels, as a tile of WIDE; zeros from row `limit` on."""
    channel = tl.arange(0, WIDE)[None, :]
    mask = (row < limit)[:, None]
    if DIM < WIDE:
        mask = mask & (channel < DIM)
    return tl.load(base + row[:, None] * stride + channel, mask=mask, other=0.0)


@triton.jit
def store_rows(base, row, stride, limit, x, DIM: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.arange(0, WIDE)[None, :]
    mask = (row < limit)[:, None]
    if DIM < WIDE:
        mask = mask & (channel < DIM)
    tl.store(base + row[:, None] * stride + channel, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def log_break(z):  # type: ignore[no-untyped-def]
    """log2(1 + 2^z): by how much a key with score z shortens what is left of the stick."""
    return tl.where(z > 24.0, z, tl.log2(1.0 + tl.exp2(z)))


@triton.jit
def sums_from(s, KEYS: tl.constexpr, AXIS: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each key of a tile (along AXIS): the sum of s over it and the keys after it.

    A product with ones; in half precision, whose 11 bits are more than the 8 that the weights are rounded to.
    """
    i, j = tl.arange(0, KEYS)[:, None], tl.arange(0, KEYS)[None, :]
    narrow = s if EXACT else tl.minimum(s, 60000.0).to(tl.float16)
    if AXIS == 1:
        sums = tl.dot(narrow, (i >= j).to(narrow.dtype), input_precision="ieee")
    else:
        sums = tl.dot((i <= j).to(narrow.dtype), narrow, input_precision="ieee")
    return sums


@triton.jit
def sums_to(g, KEYS: tl.constexpr, AXIS: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each key of a tile (along AXIS): the sum of g over it and the keys before it; gradients need bf16's range."""
    i, j = tl.arange(0, KEYS)[:, None], tl.arange(0, KEYS)[None, :]
    narrow = g if EXACT else g.to(tl.bfloat16)
    if AXIS == 1:
        sums = tl.dot(narrow, (i <= j).to(tl.float32).to(narrow.dtype), input_precision="ieee")
    else:
        sums = tl.dot((i >= j).to(tl.float32).to(narrow.dtype), narrow, input_precision="ieee")
    return sums


@triton.jit
def _query_gradient_of_tile(  # type: ignore[no-untyped-def]
    gradient, sum_gathered, tile, query, upstream, row, broken, gathered, keys, values, key_stride, value_stride,
    time, scale,
    CURRENT: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    tl.store(gathered + tile * time, sum_gathered, mask=row < time)
    sum_broken = tl.load(broken + tile * time, mask=row < time, other=0.0)
    key = tile * KEYS + tl.arange(0, KEYS)
    k = load_rows(keys, key, key_stride, time, DIM, WIDE)
    v = load_rows(values, key, value_stride, time, DIM, WIDE)
    z = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        z = tl.where(key[None, :] < row[:, None] + CURRENT, z, -1.0e30)
    s = log_break(z)
    weight = tl.exp2(z - sums_from(s, KEYS, 1, EXACT) - sum_broken[:, None])
    g = weight * tl.dot(upstream, tl.trans(v), input_precision="ieee")
    score_gradient = g - tl.exp2(z - s) * (sums_to(g, KEYS, 1, EXACT) + sum_gathered[:, None])
    gradient = tl.dot(score_gradient.to(k.dtype), k, gradient, input_precision="ieee")
    return gradient, sum_gathered + tl.sum(g, 1)


@triton.jit
def query_gradient(  # type: ignore[no-untyped-def]
    queries, keys, values, upstreams, left_gradient, broken, first_tiles, gathered, gradients,
    time, heads, group, scale, plain_scale, query_stride, key_stride, value_stride,
    CURRENT: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries."""
    part = tl.program_id(1)
    sequence, head = part // heads, part % heads
    query_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = query_tile * QUERIES + tl.arange(0, QUERIES)
    out_row = (sequence.to(tl.int64) * time * heads + head) * DIM
    queries += sequence.to(tl.int64) * time * query_stride + head * DIM
    keys += sequence.to(tl.int64) * time * key_stride + (head // group) * DIM
    values += sequence.to(tl.int64) * time * value_stride + (head // group) * DIM
    broken += part.to(tl.int64) * tl.cdiv(time, KEYS) * time + row
    gathered += part.to(tl.int64) * tl.cdiv(time, KEYS) * time + row
    query = load_rows(queries, row, query_stride, time, DIM, WIDE)
    upstream = load_rows(upstreams + out_row, row, heads * DIM, time, DIM, WIDE)

    gradient = tl.zeros([QUERIES, WIDE], tl.float32)
    sum_gathered = tl.load(left_gradient + part * time + row, mask=row < time, other=0.0)
    earliest = query_tile * QUERIES
    end = tl.cdiv(tl.minimum(earliest + QUERIES - 1 + CURRENT, time), KEYS)
    first_tile = tl.load(first_tiles + part * tl.num_programs(0) + query_tile)
    unmasked = tl.maximum((earliest + CURRENT) // KEYS, tl.minimum(first_tile, end))
    for tile in range(first_tile, unmasked):
        gradient, sum_gathered = _query_gradient_of_tile(
            gradient, sum_gathered, tile, query, upstream, row, broken, gathered, keys, values, key_stride,
            value_stride, time, scale, CURRENT, False, DIM, WIDE, KEYS, EXACT,
        )  # fmt: skip
    for tile in range(unmasked, end):
        gradient, sum_gathered = _query_gradient_of_tile(
            gradient, sum_gathered, tile, query, upstream, row, broken, gathered, keys, values, key_stride,
            value_stride, time, scale, CURRENT, True, DIM, WIDE, KEYS, EXACT,
        )  # fmt: skip
    store_rows(gradients + out_row, row, heads * DIM, time, gradient * plain_scale, DIM, WIDE)


@triton.jit
def _key_gradient_of_tile(  # type: ignore[no-untyped-def]
    key_sum, value_sum, k, v, key, query_tile, queries, upstreams, broken, gathered, first_tiles, tile, time, scale,
    query_stride, out_stride,
    CURRENT: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row = query_tile * QUERIES + tl.arange(0, QUERIES)
    was_read = row < tl.where(tl.load(first_tiles + query_tile) <= tile, time, 0)
    sum_broken = tl.load(broken + row, mask=was_read, other=float("inf"))  # so that missing rows have weights of 0
    sum_gathered = tl.load(gathered + row, mask=was_read, other=0.0)
    query = load_rows(queries, row, query_stride, time, DIM, WIDE)
    upstream = load_rows(upstreams, row, out_stride, time, DIM, WIDE)
    z = tl.dot(k, tl.trans(query), input_precision="ieee") * scale
    if MASKED:
        z = tl.where(key[:, None] < row[None, :] + CURRENT, z, -1.0e30)
    s = log_break(z)
    weight = tl.exp2(z - sums_from(s, KEYS, 0, EXACT) - sum_broken[None, :])
    value_sum = tl.dot(weight.to(upstream.dtype), upstream, value_sum, input_precision="ieee")
    g = weight * tl.dot(v, tl.trans(upstream), input_precision="ieee")
    score_gradient = g - tl.exp2(z - s) * (sums_to(g, KEYS, 0, EXACT) + sum_gathered[None, :])
    key_sum = tl.dot(score_gradient.to(query.dtype), query, key_sum, input_precision="ieee")
    return key_sum, value_sum


@triton.jit
def key_gradient(  # type: ignore[no-untyped-def]
    queries, keys, values, upstreams, broken, first_tiles, gathered, key_gradients, value_gradients,
    query_tiles, time, heads, group, scale, plain_scale, query_stride, key_stride, value_stride,
    TILES: tl.constexpr, CURRENT: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of keys and values, which a group of heads shares."""
    tile = tl.program_id(0)  # early keys have the most queries, so they go first
    kv_heads = heads // group
    sequence, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    tiles = tl.cdiv(time, KEYS)
    key = tile * KEYS + tl.arange(0, KEYS)
    keys += sequence.to(tl.int64) * time * key_stride + kv_head * DIM
    values += sequence.to(tl.int64) * time * value_stride + kv_head * DIM
    k = load_rows(keys, key, key_stride, time, DIM, WIDE)
    v = load_rows(values, key, value_stride, time, DIM, WIDE)
    # The first tile of queries in which any sees one of these keys, and the first in which all see all of them.
    begin = tl.maximum(tile * KEYS + 1 - CURRENT, 0) // QUERIES
    unmasked = tl.minimum(tl.cdiv(tl.maximum(tile * KEYS + KEYS - CURRENT, 0), QUERIES), query_tiles)
    begin = tl.minimum(begin, unmasked)

    key_sum = tl.zeros([KEYS, WIDE], tl.float32)
    value_sum = tl.zeros([KEYS, WIDE], tl.float32)
    for head in range(kv_head * group, kv_head * group + group):
        part = sequence * heads + head
        head_queries = queries + sequence.to(tl.int64) * time * query_stride + head * DIM
        head_upstreams = upstreams + (sequence.to(tl.int64) * time * heads + head) * DIM
        head_broken = broken + (part.to(tl.int64) * tiles + tile) * time
        head_gathered = gathered + (part.to(tl.int64) * tiles + tile) * time
        head_tiles = first_tiles + part * query_tiles
        index = tl.arange(0, TILES)
        readers = tl.load(head_tiles + index, mask=index < query_tiles, other=tile + 1) <= tile
        end = tl.max(tl.where(readers, index + 1, 0), 0)  # sticks that are gone earlier do not reach this tile
        for query_tile in range(begin, tl.minimum(unmasked, end)):
            key_sum, value_sum = _key_gradient_of_tile(
                key_sum, value_sum, k, v, key, query_tile, head_queries, head_upstreams, head_broken, head_gathered,
                head_tiles, tile, time, scale, query_stride, heads * DIM,
                CURRENT, True, DIM, WIDE, QUERIES, KEYS, EXACT,
            )  # fmt: skip
        for query_tile in range(unmasked, end):
            key_sum, value_sum = _key_gradient_of_tile(
                key_sum, value_sum, k, v, key, query_tile, head_queries, head_upstreams, head_broken, head_gathered,
                head_tiles, tile, time, scale, query_stride, heads * DIM,
                CURRENT, False, DIM, WIDE, QUERIES, KEYS, EXACT,
            )  # fmt: skip
    out = (sequence.to(tl.int64) * time * kv_heads + kv_head) * DIM
    store_rows(key_gradients + out, key, kv_heads * DIM, time, key_sum * plain_scale, DIM, WIDE)
    store_rows(value_gradients + out, key, kv_heads * DIM, time, value_sum, DIM, WIDE)
