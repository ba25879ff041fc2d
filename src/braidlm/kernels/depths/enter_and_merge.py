"""The way into a block of a mixture of depths and out of it: scores of all tokens, the choice of those that enter, and
their rows, which return to the stream at the end; the other tokens stay as they were.

On the way in the stream gets what is pending and is scored in one pass over memory; on the way out it also gets what
the block's last part adds. Backward the stream's gradient is written once: what passes by, what comes out of the block,
and what the scores contribute.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.launch import programs_for, row_tile
from braidlm.kernels.ops.norm import AddConfig, addition, store_gradients, stored, tile_of_program
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import on_side
from braidlm.model.mixture_of_depths import SCALE_EPS

BITS = 32
ELEMENTS, MAX_WARPS = 128, 16
"""Tokens for each warp."""


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    scores, index, places, time, count, BITS: tl.constexpr, TIME: tl.constexpr
):
    row = tl.program_id(0)
    token = tl.arange(0, TIME)
    mask = token < time
    bits = tl.load(scores + row * time + token, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    # Integers in the order of the scores: the bits of negative floats are in reverse order.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(mask, key, -2147483648)
    lowest = tl.full([], -2147483648, tl.int64)
    for step in range(BITS):
        candidate = lowest + (tl.full([], 1, tl.int64) << (BITS - 1 - step))
        lowest = tl.where(tl.sum((key >= candidate.to(tl.int32)).to(tl.int32), 0) >= count, candidate, lowest)
    higher, tied = key > lowest.to(tl.int32), (key == lowest.to(tl.int32)) & mask
    room = count - tl.sum(higher.to(tl.int32), 0)
    entered = higher | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    place = row * count + tl.cumsum(entered.to(tl.int32), 0) - 1
    tl.store(index + place, token.to(tl.int64), mask=entered)
    tl.store(places + row * time + token, tl.where(entered, place, -1), mask=mask)


class Choice(NamedTuple):
    """The tokens that enter, in their order."""

    index_BK: Tensor
    """The positions of the chosen tokens in their rows."""
    place_BT: Tensor
    """The place of every token among all that enter, or -1."""


def choose_tokens(score_BT: Tensor, count: int) -> Choice:
    """The `count` tokens of each row with the highest float32 scores; of equal ones the earlier."""
    batch, time = score_BT.shape
    index = torch.empty(batch, count, dtype=torch.int64, device=score_BT.device)
    places = torch.empty(batch, time, dtype=torch.int32, device=score_BT.device)
    padded = triton.next_power_of_2(time)
    warps = max(1, min(MAX_WARPS, padded // ELEMENTS))
    _choose[(batch,)](score_BT, index, places, time, count, BITS, padded, num_warps=warps)
    return Choice(index, places)


def plain_choose_tokens(score_BT: Tensor, count: int) -> Choice:
    """The reference, in torch's operations."""
    index_BK = score_BT.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    place_BK = torch.arange(index_BK.numel(), dtype=torch.int32, device=index_BK.device).view_as(index_BK)
    nowhere = torch.full_like(score_BT, -1, dtype=torch.int32)
    return Choice(index_BK, nowhere.scatter(1, index_BK, place_BK))


PROGRAMS_PER_SM, TILES_PER_PROGRAM = 16, 8
"""A maximum and a minimum, backward: each program writes partial sums, so it should have some rows to sum."""
STAGES = tl.constexpr(3)


@triton.jit
def _score(  # type: ignore[no-untyped-def]
    stream, delta, delta_bias, weight, seed, summed, scores, scales, rows, width, eps, keep_scale,
    THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, column_mask, mask, offsets = tile_of_program(rows, width, ROWS, COLUMNS)
    x = tl.load(stream + offsets, mask=mask, other=0.0).to(tl.float32)
    if delta is not None:
        x += addition(delta, delta_bias, seed, offsets, mask, column, column_mask, keep_scale, THRESHOLD)
    if summed is not None:
        x = stored(x, summed, offsets, mask)
    w = tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(scales + row, scale, mask=row < rows)
    tl.store(scores + row, tl.sum(x * w, 1) * scale, mask=row < rows)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    stream, scores, index, inside, inside_scores, rows, time, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    token = (row // count) * time + tl.load(index + row, mask=row_mask, other=0)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = row_mask[:, None] & (column < width)
    x = tl.load(stream + token.to(tl.int64)[:, None] * width + column, mask=mask)
    tl.store(inside + row.to(tl.int64)[:, None] * width + column, x, mask=mask)
    tl.store(inside_scores + row, tl.load(scores + token, mask=row_mask), mask=row_mask)


@triton.jit
def _enter_backward(  # type: ignore[no-untyped-def]
    merged_gradient, inside_gradient, score_gradient, inside, inside_scores, scales, places, weight, seed,
    gradient, delta_gradient, sums, rows, width, keep_scale,
    THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)[None, :]
    column_mask = column < width
    w = tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = begin + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & column_mask
        offsets = row.to(tl.int64)[:, None] * width + column
        place = tl.load(places + row, mask=row < rows, other=-1)
        entered = place >= 0
        inner_mask = entered[:, None] & column_mask
        inner_offsets = place.to(tl.int64)[:, None] * width + column
        x_gradient = tl.load(merged_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        inner_gradient = tl.load(inside_gradient + inner_offsets, mask=inner_mask, other=0.0).to(tl.float32)
        x = tl.load(inside + inner_offsets, mask=inner_mask, other=0.0).to(tl.float32)
        score = tl.load(inside_scores + place, mask=entered, other=0.0)
        ds = tl.load(score_gradient + place, mask=entered, other=0.0)
        scale = tl.load(scales + row, mask=entered, other=0.0)
        passing = tl.where(entered, tl.sigmoid(-score), 1.0)  # what the block replaces has no gradient
        x_gradient = x_gradient * passing[:, None] + inner_gradient
        x_gradient += (ds * scale)[:, None] * w - (ds * score * scale * scale / width)[:, None] * x
        weight_sum += (ds * scale)[:, None] * x
        store_gradients(x_gradient, gradient, delta_gradient, seed, offsets, mask, keep_scale, THRESHOLD)
    column = tl.arange(0, COLUMNS)
    tl.store(sums + program * width + column, tl.sum(weight_sum, 0), mask=column < width)


@dataclass(frozen=True)
class EnterConfig(AddConfig):
    """What the way into a block needs to know; `read_slot` belongs to the router's layer that reads the stream."""

    batch: int
    count: int
    """Tokens of each row that enter."""
    sums: ColumnSums


class Enter(torch.autograd.Function):
    """stream, delta [tokens, width] (or None), its bias [width] (or None), weight [1, width] -> the sum, the rows that
    enter [rows, width], their scores [rows], the scale of all tokens [tokens], and the two tensors of the choice.

    It computes the gradient for `Merge` too: of what `Merge` takes away from the rows that enter.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, delta: Tensor | None, delta_bias: Tensor | None, weight: Tensor, config: EnterConfig
    ) -> tuple[Tensor, ...]:
        (tokens, width), dropout, tile = stream.shape, config.dropout, row_tile(stream.shape[1])
        written = None if delta is None else torch.empty_like(stream)
        written = written if config.read_slot is None else config.read_slot.input
        scores = torch.empty(tokens, dtype=torch.float32, device=stream.device)
        scales = torch.empty_like(scores)
        _score[(triton.cdiv(tokens, tile["ROWS"]),)](
            stream, delta, delta_bias, weight, dropout.seed, written, scores, scales, tokens, width, SCALE_EPS,
            dropout.keep_scale, dropout.threshold, **tile,
        )  # fmt: skip
        summed = stream if written is None else written
        index_BK, place_BT = choose_tokens(scores.view(config.batch, -1), config.count)
        rows = index_BK.numel()
        inside, inside_scores = stream.new_empty(rows, width), scores.new_empty(rows)
        _gather[(triton.cdiv(rows, tile["ROWS"]),)](
            summed, scores, index_BK, inside, inside_scores, rows, tokens // config.batch, config.count, width, **tile
        )
        ctx.save_for_backward(inside, inside_scores, scales, place_BT, weight, dropout.seed)
        ctx.config, ctx.adds = config, delta is not None
        ctx.mark_non_differentiable(scales, index_BK, place_BT)
        ctx.set_materialize_grads(False)
        return summed, inside, inside_scores, scales, index_BK, place_BT

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, merged_gradient: Tensor, inside_gradient: Tensor, score_gradient: Tensor, *_: None
    ) -> tuple[Tensor | None, ...]:
        inside, inside_scores, scales, place_BT, weight, seed = ctx.saved_tensors
        config: EnterConfig = ctx.config
        (tokens, width), merged_gradient = merged_gradient.shape, merged_gradient.contiguous()
        tile = row_tile(width)
        gradient, delta_gradient = config.gradients(merged_gradient)
        tiles = triton.cdiv(tokens, tile["ROWS"] * TILES_PER_PROGRAM)
        programs = programs_for(inside.device, PROGRAMS_PER_SM, tiles)
        sums = config.sums.buffer(programs, width, inside.device)
        _enter_backward[(programs,)](
            merged_gradient, inside_gradient.contiguous(), score_gradient, inside, inside_scores, scales,
            place_BT, weight, seed, gradient, delta_gradient, sums, tokens, width, config.dropout.keep_scale,
            config.dropout.threshold, **tile,
        )  # fmt: skip
        weight_gradient = config.sums.total().view_as(weight)
        bias_gradient = _bias_gradient(config, delta_gradient) if ctx.needs_input_grad[2] else None
        return gradient, delta_gradient if ctx.adds else None, bias_gradient, weight_gradient, None


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    stream, output, delta, delta_bias, scores, places, seed, finished, merged, rows, width, keep_scale,
    THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, column_mask, mask, offsets = tile_of_program(rows, width, ROWS, COLUMNS)
    place = tl.load(places + row, mask=row < rows, other=-1)
    entered = (place >= 0)[:, None] & column_mask
    inner_offsets = place.to(tl.int64)[:, None] * width + column
    x = tl.load(stream + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(output + inner_offsets, mask=entered, other=0.0).to(tl.float32)
    if delta is not None:
        y += addition(delta, delta_bias, seed, inner_offsets, entered, column, column_mask, keep_scale, THRESHOLD)
        y = stored(y, finished, inner_offsets, entered)  # the backward pass reads it again
    weight = tl.sigmoid(tl.load(scores + place, mask=place >= 0, other=0.0))[:, None]
    x = tl.where(entered, x + weight * (y - x), x)
    tl.store(merged + offsets, x.to(merged.dtype.element_ty), mask=mask)


@triton.jit
def _merge_backward(  # type: ignore[no-untyped-def]
    merged_gradient, inside, finished, scores, index, seed, gradient, delta_gradient, score_gradient,
    rows, time, count, width, keep_scale, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    token = (row // count) * time + tl.load(index + row, mask=row_mask, other=0)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = row_mask[:, None] & (column < width)
    offsets = row.to(tl.int64)[:, None] * width + column
    upstream = tl.load(merged_gradient + token.to(tl.int64)[:, None] * width + column, mask=mask, other=0.0)
    upstream = upstream.to(tl.float32)
    changed = tl.load(finished + offsets, mask=mask, other=0.0).to(tl.float32)
    changed -= tl.load(inside + offsets, mask=mask, other=0.0).to(tl.float32)
    score = tl.load(scores + row, mask=row_mask, other=0.0)
    weight = tl.sigmoid(score)
    ds = tl.sum(upstream * changed, 1) * weight * tl.sigmoid(-score)
    tl.store(score_gradient + row, ds, mask=row_mask)
    dy = upstream * weight[:, None]
    store_gradients(dy, gradient, delta_gradient, seed, offsets, mask, keep_scale, THRESHOLD)


@dataclass(frozen=True)
class MergeConfig(AddConfig):
    """What the way out of a block needs to know."""

    choice: Choice


class Merge(torch.autograd.Function):
    """stream [tokens, width], the rows that entered, their output, delta [rows, width] (or None), its bias [width] (or
    None), scores [rows] -> the stream, in which the block's change of each row is added with the sigmoid of its score.

    What is taken away from the rows that entered has its gradient in `Enter`, which writes that of the stream anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, inside: Tensor, output: Tensor, delta: Tensor | None, delta_bias: Tensor | None,
        scores: Tensor, config: MergeConfig,
    ) -> Tensor:  # fmt: skip
        (tokens, width), tile, dropout = stream.shape, row_tile(stream.shape[1]), config.dropout
        merged = torch.empty_like(stream)
        finished = output if delta is None else torch.empty_like(output)
        _merge[(triton.cdiv(tokens, tile["ROWS"]),)](
            stream, output, delta, delta_bias, scores, config.choice.place_BT, dropout.seed, finished, merged,
            tokens, width, dropout.keep_scale, dropout.threshold, **tile,
        )  # fmt: skip
        ctx.save_for_backward(inside, finished, scores, dropout.seed)
        ctx.config, ctx.adds = config, delta is not None
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, merged_gradient: Tensor) -> tuple[Tensor | None, ...]:
        inside, finished, scores, seed = ctx.saved_tensors
        config: MergeConfig = ctx.config
        (rows, width), (batch, count) = inside.shape, config.choice.index_BK.shape
        tile, merged_gradient = row_tile(width), merged_gradient.contiguous()
        gradient, delta_gradient = config.gradients(inside)
        score_gradient = torch.empty_like(scores)
        _merge_backward[(triton.cdiv(rows, tile["ROWS"]),)](
            merged_gradient, inside, finished, scores, config.choice.index_BK, seed, gradient, delta_gradient,
            score_gradient, rows, len(merged_gradient) // batch, count, width, config.dropout.keep_scale,
            config.dropout.threshold, **tile,
        )  # fmt: skip
        bias_gradient = _bias_gradient(config, delta_gradient) if ctx.needs_input_grad[4] else None
        of_delta = delta_gradient if ctx.adds else None
        return merged_gradient, None, gradient, of_delta, bias_gradient, score_gradient, None


def _bias_gradient(config: AddConfig, delta_gradient: Tensor) -> Tensor:
    with on_side(config.side, delta_gradient, priority=True):
        return delta_gradient.sum(0, dtype=torch.float32)


def plain_enter(
    stream: Tensor, delta: Tensor | None, delta_bias: Tensor | None, weight: Tensor, token_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference, in torch's operations, where `token_R` enter: the sum, their rows, and the scores of all."""
    if delta is not None:
        stream = stream + (delta if delta_bias is None else delta + delta_bias)
    scale = (stream.square().mean(-1) + SCALE_EPS).rsqrt()
    return stream, stream[token_R], (stream @ weight[0]) * scale


def plain_merge(
    stream: Tensor,
    inside: Tensor,
    output: Tensor,
    delta: Tensor | None,
    delta_bias: Tensor | None,
    scores: Tensor,
    token_R: Tensor,
) -> Tensor:
    """The reference, in torch's operations; here the rows that entered have their whole gradient."""
    if delta is not None:
        output = output + (delta if delta_bias is None else delta + delta_bias)
    return stream.index_add(0, token_R, (output - inside) * scores.sigmoid()[:, None])
