"""The gradients of attention for routed queries.

Some programs make those of the queries; others those of keys and values, and the zeros of the queries that were not
asked. Both also sum their gradients over tokens, for the bias of the layer that made queries, keys and values.

Both need, of each row and head, the product `delta` of what attention gave with its gradient. The programs of the
queries come first and make it, and they also leave the queries as sorted rows: those of the keys read them for every
tile of keys, and need not look up where a row comes from before they can ask for it.
"""

from braidlm.kernels.routed.attention_tiles import is_kept, is_visible, key_range, part_of_program

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

SCAN = 1024
"""Rows looked at together in search of the first that sees a tile of keys."""


@triton.jit
def _load_words(words, rows, offsets, inside):  # type: ignore[no-untyped-def]
    step = tl.load(words + offsets, mask=inside, other=0).to(tl.uint32, bitcast=True)
    offset = tl.load(words + rows + offsets, mask=inside, other=0).to(tl.uint32, bitcast=True)
    return step, offset


@triton.jit
def _query_gradient_of_keys(  # type: ignore[no-untyped-def]
    gradient, query, upstream, lse, delta, when, step, offset, keys, values, stride, begin, end, scale, keep_scale,
    DIM: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, DIM)[None, :]
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        offsets = key[:, None] * stride + channel
        if MASKED:
            k = tl.load(keys + offsets, mask=(key < end)[:, None], other=0.0)
            v = tl.load(values + offsets, mask=(key < end)[:, None], other=0.0)
        else:
            k = tl.load(keys + offsets)
            v = tl.load(values + offsets)
        score = tl.dot(query, tl.trans(k), input_precision="ieee")
        weight_gradient = tl.dot(upstream, tl.trans(v), input_precision="ieee")
        weight = tl.exp2(score * scale - lse[:, None])
        if MASKED:
            weight = tl.where(is_visible(key[None, :], when[:, None], WINDOW), weight, 0.0)
        if THRESHOLD > 0:
            kept = is_kept(step[:, None], offset[:, None], key[None, :], THRESHOLD)
            weight_gradient = tl.where(kept, weight_gradient, 0.0) * keep_scale
        score_gradient = weight * (weight_gradient - delta[:, None])
        gradient = tl.dot(score_gradient.to(k.dtype), k, gradient, input_precision="ieee")
    return gradient


@triton.jit
def query_gradient(  # type: ignore[no-untyped-def]
    qkv, source, begins, out, upstream, lse, words, delta, queries, gradient, sums, rows, time, batch, blocks, heads,
    scale, plain_scale, keep_scale, slots,
    DIM: tl.constexpr, WINDOW: tl.constexpr, THRESHOLD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of a tile of rows, counted from the last."""
    index = tl.program_id(1)
    block, sequence, head = part_of_program(blocks, heads)
    width, stride = heads * DIM, blocks * 3 * heads * DIM
    first = tl.load(begins + block * (batch + 1) + sequence)
    last = tl.load(begins + block * (batch + 1) + sequence + 1)
    begin = first + (tl.cdiv(last - first, QUERIES) - 1 - index) * QUERIES
    total = tl.zeros([DIM], tl.float32)
    if begin >= first:
        origin = sequence * time
        row = begin + tl.arange(0, QUERIES)
        inside = row < last
        channel = tl.arange(0, DIM)[None, :]
        when = tl.load(source + row, mask=inside, other=origin - 1) - origin
        start = origin.to(tl.int64) * stride + (block * 3 * heads + head) * DIM
        asked = start + when[:, None] * stride + channel
        query = tl.load(qkv + asked, mask=inside[:, None], other=0.0)
        offsets = row.to(tl.int64)[:, None] * width + head * DIM + channel
        above = tl.load(upstream + offsets, mask=inside[:, None], other=0.0)
        tl.store(queries + offsets, query, mask=inside[:, None])
        made = tl.load(out + offsets, mask=inside[:, None], other=0.0)
        along = tl.sum(made.to(tl.float32) * above.to(tl.float32), 1)
        tl.store(delta + head * rows + row, along, mask=inside)
        height = tl.load(lse + head * rows + row, mask=inside, other=float("inf"))
        step, offset = 0, 0
        if THRESHOLD > 0:
            step, offset = _load_words(words, rows, 2 * head * rows + row, inside)

        found = tl.zeros([QUERIES, DIM], tl.float32)
        lowest, masked, end = key_range(source, begin, tl.minimum(begin + QUERIES, last), origin, KEYS, WINDOW)
        keys, values = qkv + start + width, qkv + start + 2 * width
        if WINDOW == 0:
            found = _query_gradient_of_keys(
                found, query, above, height, along, when, step, offset, keys, values, stride, lowest, masked, scale,
                keep_scale, DIM, KEYS, STAGES, False, WINDOW, THRESHOLD,
            )  # fmt: skip
        found = _query_gradient_of_keys(
            found, query, above, height, along, when, step, offset, keys, values, stride, masked, end, scale,
            keep_scale, DIM, KEYS, STAGES, True, WINDOW, THRESHOLD,
        )  # fmt: skip
        found *= plain_scale
        tl.store(gradient + asked, found.to(gradient.dtype.element_ty), mask=inside[:, None])
        total = tl.sum(tl.where(inside[:, None], found, 0.0), 0)
    if sums is not None:
        sums += (sequence * slots + index) * stride + (block * 3 * heads + head) * DIM
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
        inside = row < count
        offsets = row[:, None] * width + channel
        query = tl.load(queries + offsets, mask=inside[:, None], other=0.0)
        above = tl.load(upstream + offsets, mask=inside[:, None], other=0.0)
        height = tl.load(lse + row, mask=inside, other=float("inf"))  # where there is no row, weights are 0
        along = tl.load(delta + row, mask=inside, other=0.0)
        score = tl.dot(k, tl.trans(query), input_precision="ieee")
        weight = tl.exp2(score * scale - height[None, :])
        if MASKED:
            when = tl.load(source + row, mask=inside, other=origin) - origin
            weight = tl.where(is_visible(key[:, None], when[None, :], WINDOW), weight, 0.0)
        weight_gradient = tl.dot(v, tl.trans(above), input_precision="ieee")
        left = weight
        if THRESHOLD > 0:
            step, offset = _load_words(words, rows, row, inside)
            kept = is_kept(step[None, :], offset[None, :], key[:, None], THRESHOLD)
            left = tl.where(kept, weight, 0.0)
            weight_gradient = tl.where(kept, weight_gradient, 0.0) * keep_scale
        value_gradient = tl.dot(left.to(above.dtype), above, value_gradient, input_precision="ieee")
        score_gradient = weight * (weight_gradient - along[None, :])
        key_gradient = tl.dot(score_gradient.to(query.dtype), query, key_gradient, input_precision="ieee")
    return key_gradient, value_gradient


@triton.jit
def key_gradient(  # type: ignore[no-untyped-def]
    qkv, source, begins, routed, upstream, lse, words, delta, queries, gradient, sums, rows, time, batch, blocks, heads,
    scale, plain_scale, keep_scale, slots,
    DIM: tl.constexpr, WINDOW: tl.constexpr, THRESHOLD: tl.constexpr, SCAN: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of a tile of keys, counted from the first."""
    index = tl.program_id(1)
    block, sequence, head = part_of_program(blocks, heads)
    width, stride = heads * DIM, blocks * 3 * heads * DIM
    first = tl.load(begins + block * (batch + 1) + sequence)
    last = tl.load(begins + block * (batch + 1) + sequence + 1)
    origin = sequence * time
    earliest = index * KEYS  # early keys are seen by most: they go first
    key = earliest + tl.arange(0, KEYS)
    inside = key < time
    channel = tl.arange(0, DIM)[None, :]
    start = origin.to(tl.int64) * stride + (block * 3 * heads + head) * DIM
    offsets = start + key[:, None] * stride + channel
    k = tl.load(qkv + offsets + width, mask=inside[:, None], other=0.0)
    v = tl.load(qkv + offsets + 2 * width, mask=inside[:, None], other=0.0)
    asked = tl.load(routed + (origin + key).to(tl.int64) * blocks + block, mask=inside, other=1)

    source += first  # from here on, rows count from this sequence's first
    upstream += first.to(tl.int64) * width + head * DIM
    queries += first.to(tl.int64) * width + head * DIM
    lse += head * rows + first
    delta += head * rows + first
    if THRESHOLD > 0:
        words += 2 * head * rows + first
    count = last - first
    begin = 0  # of the rows that see any of these keys
    unmasked = 0  # of those that see all
    end = 0
    for scanned in range(0, count, SCAN):
        row = scanned + tl.arange(0, SCAN)
        when = tl.load(source + row, mask=row < count, other=origin + time + KEYS + WINDOW) - origin
        begin += tl.sum((when < earliest).to(tl.int32), 0)
        unmasked += tl.sum((when < earliest + KEYS - 1).to(tl.int32), 0)
        if WINDOW > 0:
            end += tl.sum((when < earliest + KEYS - 1 + WINDOW).to(tl.int32), 0)
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
    tl.store(gradient + offsets + width, key_sum.to(dtype), mask=inside[:, None])
    tl.store(gradient + offsets + 2 * width, value_sum.to(dtype), mask=inside[:, None])
    if sums is not None:  # a token that is not there has no keys, and its sums are 0
        sums += (sequence * slots + index) * stride + (block * 3 * heads + head) * DIM
        tl.store(sums + width + tl.arange(0, DIM), tl.sum(key_sum, 0))
        tl.store(sums + 2 * width + tl.arange(0, DIM), tl.sum(value_sum, 0))
    tl.store(gradient + offsets, tl.zeros([KEYS, DIM], dtype), mask=(asked == 0)[:, None])
