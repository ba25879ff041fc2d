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
def _break_sticks(  # type: ignore[no-untyped-def]
    scores, first_keys, weights, left, rows, keys, first_position, group, scale,
    CURRENT: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Scores [sequence, row, key] to weights, for a tile of rows from its last key to its first."""
    sequence = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = first_position + row // group
    base = (sequence.to(tl.int64) * rows + row) * keys
    first_key = 0
    if first_keys is not None:
        first_key = tl.load(first_keys + sequence)
    broken = tl.zeros([ROWS], tl.float32)
    tile = tl.cdiv(keys, KEYS) - 1
    while tile >= 0:
        key = tile * KEYS + tl.arange(0, KEYS)
        at = base[:, None] + key[None, :]
        there = (row < rows)[:, None] & (key < keys)[None, :]
        seen = there & (key[None, :] < (position + CURRENT)[:, None]) & (key >= first_key)[None, :]
        z = tl.load(scores + at, mask=seen, other=-1.0e30) * scale
        s = log_break(z)
        weight = tl.exp2(z - sums_from(s, KEYS, 1, EXACT) - broken[:, None])
        tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=there)
        broken += tl.sum(s, 1)
        tile -= 1
    tl.store(left + sequence.to(tl.int64) * rows + row, tl.exp2(-broken), mask=row < rows)


@triton.jit
def _score_gradient(  # type: ignore[no-untyped-def]
    scores, first_keys, weights, upstream, left_gradient, gradient, rows, keys, first_position, group, scale,
    plain_scale, CURRENT: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores from that of the weights, for a tile of rows from its first key to its last."""
    sequence = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = first_position + row // group
    base = (sequence.to(tl.int64) * rows + row) * keys
    first_key = 0
    if first_keys is not None:
        first_key = tl.load(first_keys + sequence)
    gathered = tl.load(left_gradient + sequence.to(tl.int64) * rows + row, mask=row < rows, other=0.0)
    for begin in range(0, keys, KEYS):
        key = begin + tl.arange(0, KEYS)
        at = base[:, None] + key[None, :]
        there = (row < rows)[:, None] & (key < keys)[None, :]
        seen = there & (key[None, :] < (position + CURRENT)[:, None]) & (key >= first_key)[None, :]
        z = tl.load(scores + at, mask=seen, other=-1.0e30) * scale
        weight = tl.load(weights + at, mask=seen, other=0.0).to(tl.float32)
        g = weight * tl.load(upstream + at, mask=seen, other=0.0)
        share = tl.exp2(z - log_break(z))
        score_gradient = (g - share * (sums_to(g, KEYS, 1, EXACT) + gathered[:, None])) * plain_scale
        tl.store(gradient + at, score_gradient.to(gradient.dtype.element_ty), mask=there)
        gathered += tl.sum(g, 1)


class WideStickBreaking(torch.autograd.Function):
    """As `StickBreaking`: queries [batch, time, heads, dim], keys and values [batch, length, kv heads, dim]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        current: bool = True,
        first_keys: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch, time, heads, _ = query.shape
        length, kv_heads = key.shape[1:3]
        group = heads // kv_heads
        rows, keys, values = _as_rows(query, kv_heads), _as_rows(key, kv_heads), _as_rows(value, kv_heads)
        sequence_first_keys = None if first_keys is None else first_keys.repeat_interleave(kv_heads)
        out = torch.empty_like(rows)
        left = query.new_empty(batch * kv_heads, time * group, dtype=torch.float32)
        kept = []
        for chunk, position, end in _chunks(time, length, group):
            scores = _product(rows[:, chunk], keys[:, :end].mT)
            weights = scores.new_empty(scores.shape, dtype=query.dtype)
            chunk_left = torch.empty_like(left[:, chunk])
            _break_sticks[(triton.cdiv(scores.shape[1], ROWS), len(scores))](
                scores, sequence_first_keys, weights, chunk_left, *scores.shape[1:], position, group,
                scale * LOG2_E, int(current), query.dtype == torch.float32, ROWS, KEYS, num_warps=WARPS,
            )  # fmt: skip
            torch.bmm(weights, values[:, :end], out=out[:, chunk])
            left[:, chunk] = chunk_left
            if any(ctx.needs_input_grad):
                kept += [scores, weights]
        ctx.save_for_backward(rows, keys, values, sequence_first_keys, left, *kept)
        ctx.scale, ctx.current, ctx.shapes = scale, current, (query.shape, key.shape)
        return _as_heads(out, query.shape), left.unflatten(0, (batch, kv_heads)).unflatten(2, (time, group)).transpose(
            2, 3
        ).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, left_upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, keys, values, first_keys, left, *kept = ctx.saved_tensors
        (batch, time, heads, _), key_shape = ctx.shapes
        length, kv_heads = key_shape[1:3]
        group = heads // kv_heads
        upstream_rows = _as_rows(upstream, kv_heads)
        left_gradient = torch.zeros_like(left)
        if left_upstream is not None:
            by_group = left_upstream.unflatten(1, (kv_heads, group)).transpose(2, 3)
            left_gradient = left * by_group.reshape(left.shape)
        query_gradient = torch.empty_like(rows)
        key_gradient, value_gradient = torch.zeros_like(keys), torch.zeros_like(values)
        for index, (chunk, position, end) in enumerate(_chunks(time, length, group)):
            scores, weights = kept[2 * index : 2 * index + 2]
            chunk_upstream = upstream_rows[:, chunk]
            gradient = torch.empty_like(weights)
            _score_gradient[(triton.cdiv(scores.shape[1], ROWS), len(scores))](
                scores, first_keys, weights, _product(chunk_upstream, values[:, :end].mT),
                left_gradient[:, chunk].contiguous(), gradient, *scores.shape[1:], position, group,
                ctx.scale * LOG2_E, ctx.scale, int(ctx.current), rows.dtype == torch.float32, ROWS, KEYS,
                num_warps=WARPS,
            )  # fmt: skip
            query_gradient[:, chunk] = gradient @ keys[:, :end]
            key_gradient[:, :end] += gradient.mT @ rows[:, chunk]
            value_gradient[:, :end] += weights.mT @ chunk_upstream
        shapes = ((batch, time, heads, rows.shape[-1]), key_shape, key_shape)
        gradients = (query_gradient, key_gradient, value_gradient)
        return *(_as_heads(x, shape) for x, shape in zip(gradients, shapes, strict=True)), *[None] * 3


def _as_rows(x: Tensor, kv_heads: int) -> Tensor:
    """[batch, time, heads, dim] -> [batch x kv head, time x heads of one kv head, dim]; a view for one kv head."""
    return x.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _as_heads(rows: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The inverse of `_as_rows`."""
    batch, time, heads, dim = shape
    return rows.view(batch, -1, time, heads * batch // len(rows), dim).transpose(1, 2).reshape(shape)


def _chunks(time: int, length: int, group: int) -> Iterator[tuple[slice, int, int]]:
    """Rows of a chunk of queries, the position of its first query, and the end of the keys that it sees."""
    for begin in range(0, time, CHUNK):
        end = min(begin + CHUNK, time)
        yield slice(begin * group, end * group), length - time + begin, length - time + end


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A batched product in float32: scores are added up, so they must not be rounded."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
