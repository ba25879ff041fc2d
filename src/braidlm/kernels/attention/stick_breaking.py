"""Stick-breaking attention without a matrix of weights in memory (ModuleFormer, equation 4).

A query breaks a stick from the nearest key backwards: with score z, a key gets the share sigmoid(z) of what the keys
after it left. In base 2 and with s = log2(1 + 2^z), the weight of key j is 2^(z_j - s_j - sum of s over later keys).

Keys are read in tiles from the last to the first. What all tiles after one broke off is stored for the backward pass
(`broken`), and so is the first tile that was read: where nothing is left of any stick the rest is not read at all.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.attention.stick_breaking_tiles import (
    GONE,
    LOG2_E,
    TILES,
    Tiles,
    key_gradient,
    load_rows,
    log_break,
    query_gradient,
    store_rows,
    sums_from,
)
from braidlm.kernels.optional_triton import tl, triton


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    acc, sum_broken, tile, query, row, keys, values, key_stride, value_stride, time, scale,
    CURRENT: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    key = tile * KEYS + tl.arange(0, KEYS)
    k = load_rows(keys, key, key_stride, time, DIM, WIDE)
    v = load_rows(values, key, value_stride, time, DIM, WIDE)
    z = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        z = tl.where(key[None, :] < row[:, None] + CURRENT, z, -1.0e30)
    s = log_break(z)
    weight = tl.exp2(z - sums_from(s, KEYS, 1, EXACT) - sum_broken[:, None])
    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return acc, sum_broken + tl.sum(s, 1)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    queries, keys, values, out, broken, first_tiles, left, time, heads, group, scale,
    query_stride, key_stride, value_stride, CURRENT: tl.constexpr, GONE: tl.constexpr, SPAN: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    sequence, head = part // heads, part % heads
    query_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries attend to the most keys, so they go first
    row = query_tile * QUERIES + tl.arange(0, QUERIES)
    queries += sequence.to(tl.int64) * time * query_stride + head * DIM
    keys += sequence.to(tl.int64) * time * key_stride + (head // group) * DIM
    values += sequence.to(tl.int64) * time * value_stride + (head // group) * DIM
    broken += part.to(tl.int64) * tl.cdiv(time, KEYS) * time + row
    query = load_rows(queries, row, query_stride, time, DIM, WIDE)

    acc = tl.zeros([QUERIES, WIDE], tl.float32)
    sum_broken = tl.zeros([QUERIES], tl.float32)
    earliest = query_tile * QUERIES
    tile = tl.cdiv(tl.minimum(earliest + QUERIES - 1 + CURRENT, time), KEYS) - 1
    unmasked = (earliest + CURRENT) // KEYS  # every row sees all keys of the tiles before this one
    while tile >= unmasked:
        tl.store(broken + tile * time, sum_broken, mask=row < time)
        acc, sum_broken = _attend_tile(
            acc, sum_broken, tile, query, row, keys, values, key_stride, value_stride, time, scale,
            CURRENT, True, DIM, WIDE, KEYS, EXACT,
        )  # fmt: skip
        tile -= 1
    reach = tl.min(sum_broken, 0)
    while (tile >= 0) & (reach < GONE):
        end = tl.maximum(tile - SPAN, -1)  # a loop of known length, whose loads run ahead
        for back in range(0, tile - end):
            tl.store(broken + (tile - back) * time, sum_broken, mask=row < time)
            acc, sum_broken = _attend_tile(
                acc, sum_broken, tile - back, query, row, keys, values, key_stride, value_stride, time, scale,
                CURRENT, False, DIM, WIDE, KEYS, EXACT,
            )  # fmt: skip
        reach = tl.min(sum_broken, 0)
        tile = end
    tl.store(first_tiles + part * tl.num_programs(0) + query_tile, tile + 1)
    store_rows(out + (sequence.to(tl.int64) * time * heads + head) * DIM, row, heads * DIM, time, acc, DIM, WIDE)
    tl.store(left + part * time + row, tl.exp2(-sum_broken), mask=row < time)


class StickBreaking(torch.autograd.Function):
    """Queries [batch, time, heads, dim], keys and values [batch, time, kv heads, dim] -> the output of the queries'
    shape, and what is left of each stick [batch, heads, time].

    `current`: whether a token attends to itself. Rows may be slices of a wider tensor, whose heads follow one another.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, current: bool = True,
        tiles: Tiles | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch, time, heads, dim = query.shape
        for x in (query, key, value):
            assert x.stride()[2:] == (dim, 1)
            assert x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
        assert heads % key.shape[2] == 0
        tiles = tiles or TILES[query.element_size()]
        query_tiles, key_tiles = triton.cdiv(time, tiles.queries), triton.cdiv(time, tiles.keys)
        out = query.new_empty(batch, time, heads, dim)
        broken = query.new_empty(batch * heads, key_tiles, time, dtype=torch.float32)
        first_tiles = query.new_empty(batch * heads, query_tiles, dtype=torch.int32)
        left = query.new_empty(batch, heads, time, dtype=torch.float32)
        sizes = (time, heads, heads // key.shape[2])
        strides = (query.stride(1), key.stride(1), value.stride(1))
        options = {
            "CURRENT": int(current), "DIM": dim, "WIDE": max(16, triton.next_power_of_2(dim)),
            "QUERIES": tiles.queries, "KEYS": tiles.keys, "EXACT": query.dtype == torch.float32,
        }  # fmt: skip
        _attend[(query_tiles, batch * heads)](
            query, key, value, out, broken, first_tiles, left, *sizes, scale * LOG2_E, *strides,
            **options, GONE=GONE, SPAN=tiles.span, **tiles.attend,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, broken, first_tiles, left)
        ctx.scale, ctx.sizes, ctx.strides, ctx.options, ctx.tiles = scale, sizes, strides, options, tiles
        return out, left

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, left_upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, broken, first_tiles, left = ctx.saved_tensors
        batch, time, heads, _ = query.shape
        upstream = upstream.contiguous()
        left_gradient = torch.zeros_like(left) if left_upstream is None else left * left_upstream
        query_gradient_, key_gradient_, value_gradient_ = (x.new_empty(x.shape) for x in (query, key, value))
        gathered = torch.empty_like(broken)
        shared = (broken, first_tiles, gathered)
        scales = (ctx.scale * LOG2_E, ctx.scale)
        query_gradient[(first_tiles.shape[1], batch * heads)](
            query, key, value, upstream, left_gradient, *shared, query_gradient_, *ctx.sizes, *scales,
            *ctx.strides, **ctx.options, **ctx.tiles.query_gradient,
        )  # fmt: skip
        key_gradient[(triton.cdiv(time, ctx.tiles.keys), batch * key.shape[2])](
            query, key, value, upstream, *shared, key_gradient_, value_gradient_,
            first_tiles.shape[1], *ctx.sizes, *scales, *ctx.strides,
            TILES=triton.next_power_of_2(first_tiles.shape[1]),
            **ctx.options, **ctx.tiles.key_gradient,
        )  # fmt: skip
        return query_gradient_, key_gradient_, value_gradient_, *[None] * 3


def plain_stick_breaking(
    query: Tensor, key: Tensor, value: Tensor, scale: float, current: bool = True
) -> tuple[Tensor, Tensor]:
    """The reference, in torch's operations."""
    time, group = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    score = torch.einsum("bthd,bshd->bhts", query, key) * scale
    visible = torch.ones(time, time, dtype=torch.bool, device=query.device).tril(0 if current else -1)
    log_rest = -torch.nn.functional.softplus(score).masked_fill(~visible, 0.0)
    weights = (score + log_rest.flip(-1).cumsum(-1).flip(-1)).masked_fill(~visible, -torch.inf).exp()
    return torch.einsum("bhts,bshd->bthd", weights, value), log_rest.sum(-1).exp()
