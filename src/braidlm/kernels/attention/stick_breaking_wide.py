"""Stick-breaking attention for heads too wide for a tile (ModuleFormer's have 1024 channels).

Matrix products compute scores and outputs, a kernel turns the scores of a chunk of queries into weights. The queries of
all heads that share a key follow one another as rows of one matrix, so keys and values are never repeated.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.attention.stick_breaking_tiles import LOG2_E, log_break, sums_from, sums_to
from braidlm.kernels.optional_triton import tl, triton

CHUNK = 256
"""Queries whose scores are in memory at once, and for which later keys are left out."""
ROWS, KEYS, WARPS = 32, 64, 4


@triton.jit
def _rows_of_program(rows, first_position, group, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of rows of a sequence, their places among the rows of all sequences, and their positions."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row, tl.program_id(1).to(tl.int64) * rows + row, first_position + row // group


@triton.jit
def _scores_of_tile(  # type: ignore[no-untyped-def]
    scores, begin, row, place, position, rows, keys, scale, CURRENT: tl.constexpr, KEYS: tl.constexpr
):
    """Scores of some rows and keys, where they are in memory, which exist, and which of them are seen."""
    key = begin + tl.arange(0, KEYS)
    at = (place * keys)[:, None] + key[None, :]
    there = (row < rows)[:, None] & (key < keys)[None, :]
    seen = there & (key[None, :] < (position + CURRENT)[:, None])
    return tl.load(scores + at, mask=seen, other=-1.0e30) * scale, at, there, seen


@triton.jit
def _break_sticks(  # type: ignore[no-untyped-def]
    scores, weights, left, rows, keys, first_position, group, scale,
    CURRENT: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Scores [sequence, row, key] to weights, for a tile of rows from its last key to its first."""
    row, place, position = _rows_of_program(rows, first_position, group, ROWS)
    broken = tl.zeros([ROWS], tl.float32)
    tile = tl.cdiv(keys, KEYS) - 1
    while tile >= 0:
        z, at, there, _ = _scores_of_tile(scores, tile * KEYS, row, place, position, rows, keys, scale, CURRENT, KEYS)
        s = log_break(z)
        weight = tl.exp2(z - sums_from(s, KEYS, 1, EXACT) - broken[:, None])
        tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=there)
        broken += tl.sum(s, 1)
        tile -= 1
    tl.store(left + place, tl.exp2(-broken), mask=row < rows)


@triton.jit
def _score_gradient(  # type: ignore[no-untyped-def]
    scores, weights, upstream, left_gradient, gradient, rows, keys, first_position, group, scale, plain_scale,
    CURRENT: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores from that of the weights, for a tile of rows from its first key to its last."""
    row, place, position = _rows_of_program(rows, first_position, group, ROWS)
    gathered = tl.load(left_gradient + place, mask=row < rows, other=0.0)
    for begin in range(0, keys, KEYS):
        z, at, there, seen = _scores_of_tile(scores, begin, row, place, position, rows, keys, scale, CURRENT, KEYS)
        weight = tl.load(weights + at, mask=seen, other=0.0).to(tl.float32)
        g = weight * tl.load(upstream + at, mask=seen, other=0.0)
        share = tl.exp2(z - log_break(z))
        score_gradient = (g - share * (sums_to(g, KEYS, 1, EXACT) + gathered[:, None])) * plain_scale
        tl.store(gradient + at, score_gradient.to(gradient.dtype.element_ty), mask=there)
        gathered += tl.sum(g, 1)


class WideStickBreaking(torch.autograd.Function):
    """As `StickBreaking`: queries [batch, time, heads, dim], keys and values [batch, time, kv heads, dim]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, current: bool = True
    ) -> tuple[Tensor, Tensor]:
        (batch, time, heads, _), kv_heads = query.shape, key.shape[2]
        group = heads // kv_heads
        rows, keys, values = (_as_rows(x, kv_heads) for x in (query, key, value))
        out = torch.empty_like(rows)
        left = query.new_empty(batch * kv_heads, time * group, dtype=torch.float32)
        kept = []
        for chunk, position, end in _chunks(time, group):
            scores = _product(rows[:, chunk], keys[:, :end].mT)
            weights = scores.new_empty(scores.shape, dtype=query.dtype)
            chunk_left = torch.empty_like(left[:, chunk])
            _break_sticks[(triton.cdiv(scores.shape[1], ROWS), len(scores))](
                scores, weights, chunk_left, *scores.shape[1:], position, group, scale * LOG2_E, int(current),
                query.dtype == torch.float32, ROWS, KEYS, num_warps=WARPS,
            )  # fmt: skip
            torch.bmm(weights, values[:, :end], out=out[:, chunk])
            left[:, chunk] = chunk_left
            if any(ctx.needs_input_grad):
                kept += [scores, weights]
        ctx.save_for_backward(rows, keys, values, left, *kept)
        ctx.scale, ctx.current, ctx.shapes = scale, current, (query.shape, key.shape, key.shape)
        by_head = left.view(batch, kv_heads, time, group).transpose(2, 3).flatten(1, 2)
        return _as_heads(out, query.shape), by_head

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, left_upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, keys, values, left, *kept = ctx.saved_tensors
        (_, time, heads, _), kv_heads = ctx.shapes[0], ctx.shapes[1][2]
        group = heads // kv_heads
        upstream_rows = _as_rows(upstream, kv_heads)
        left_gradient = torch.zeros_like(left)
        if left_upstream is not None:
            by_group = left_upstream.unflatten(1, (kv_heads, group)).transpose(2, 3)
            left_gradient = left * by_group.reshape(left.shape)
        query_gradient, key_gradient, value_gradient = torch.empty_like(rows), *map(torch.zeros_like, (keys, values))
        for index, (chunk, position, end) in enumerate(_chunks(time, group)):
            scores, weights = kept[2 * index : 2 * index + 2]
            chunk_upstream = upstream_rows[:, chunk]
            gradient = torch.empty_like(weights)
            _score_gradient[(triton.cdiv(scores.shape[1], ROWS), len(scores))](
                scores, weights, _product(chunk_upstream, values[:, :end].mT), left_gradient[:, chunk].contiguous(),
                gradient, *scores.shape[1:], position, group, ctx.scale * LOG2_E, ctx.scale, int(ctx.current),
                rows.dtype == torch.float32, ROWS, KEYS, num_warps=WARPS,
            )  # fmt: skip
            query_gradient[:, chunk] = gradient @ keys[:, :end]
            key_gradient[:, :end] += gradient.mT @ rows[:, chunk]
            value_gradient[:, :end] += weights.mT @ chunk_upstream
        gradients = (query_gradient, key_gradient, value_gradient)
        return *map(_as_heads, gradients, ctx.shapes), None, None


def _as_rows(x: Tensor, kv_heads: int) -> Tensor:
    """[batch, time, heads, dim] -> [batch x kv head, time x heads of one kv head, dim]; a view for one kv head."""
    return x.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _as_heads(rows: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_as_rows`."""
    batch, time, heads, dim = shape
    return rows.view(batch, -1, time, heads * batch // len(rows), dim).transpose(1, 2).reshape(shape)


def _chunks(time: int, group: int) -> Iterator[tuple[slice, int, int]]:
    """Rows of a chunk of queries, the position of its first query, and the end of the keys that it sees."""
    for begin in range(0, time, CHUNK):
        end = min(begin + CHUNK, time)
        yield slice(begin * group, end * group), begin, end


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A batched product in float32: scores are added up, so they must not be rounded."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
