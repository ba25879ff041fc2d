"""The ends of a model: tokens and positions into the stream, and the head with its loss.

The embedding takes one pass over memory forward and one backward. In the head, the logits become their own gradient in
place, one program per row. The first sweep over a row computes its maximum and its sum of exponentials, the second,
which reads it from the cache, writes the gradient. In the first sweep each lane keeps a maximum and a sum of its own,
so that no thread waits for another before the end of the row. The reference is `next_token_loss` of the head's output.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.launch import is_nvidia, row_tile
from braidlm.kernels.ops.linear import product, side_if_small
from braidlm.kernels.ops.norm import tile_of_program
from braidlm.kernels.ops.tuned_products import tuned_product
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import DeferredGradient, current_side_stream, on_side

WARPS, PER_LANE, BLOCK = 16, 8, 8192
"""Warps for a row, elements that a lane loads at once (16 bytes of bf16), elements of a block of the scaling."""


@triton.jit
def _embed_forward(  # type: ignore[no-untyped-def]
    ids, tokens, positions, stream, rows, time, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, _, mask, offsets = tile_of_program(rows, width, ROWS, COLUMNS)
    token = tl.load(ids + row, mask=row < rows, other=0).to(tl.int64)[:, None]
    x = tl.load(tokens + token * width + column, mask=mask, other=0.0).to(tl.float32)
    if positions is not None:
        x += tl.load(positions + (row % time)[:, None] * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(stream + offsets, x.to(stream.dtype.element_ty), mask=mask)


@triton.jit
def _embed_backward(  # type: ignore[no-untyped-def]
    ids, gradient, token_gradient, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, _, mask, offsets = tile_of_program(rows, width, ROWS, COLUMNS)
    token = tl.load(ids + row, mask=row < rows, other=0).to(tl.int64)[:, None]
    x = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(token_gradient + token * width + column, x, mask=mask, sem="relaxed")


class Embed(torch.autograd.Function):
    """ids [batch, time], tokens [vocabulary, width], positions [context, width] or None -> [batch * time, width]."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, tokens: Tensor, positions: Tensor | None, dtype: torch.dtype,
        tied: DeferredGradient | None,
    ) -> Tensor:  # fmt: skip
        width, time = tokens.shape[1], ids.shape[1]
        stream = torch.empty(ids.numel(), width, dtype=dtype, device=tokens.device)
        tile = row_tile(width)
        grid = (triton.cdiv(len(stream), tile["ROWS"]),)
        _embed_forward[grid](ids, tokens, positions, stream, len(stream), time, width, **tile)
        ctx.save_for_backward(ids)
        ctx.vocabulary, ctx.context = len(tokens), None if positions is None else len(positions)
        ctx.side, ctx.tied = current_side_stream(), tied
        return stream

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        (rows, width), tile = gradient.shape, row_tile(gradient.shape[1])
        gradient = gradient.contiguous()
        positions = None
        if ctx.context is not None:
            with on_side(ctx.side, gradient, priority=True):
                positions = gradient.view(*ids.shape, width).sum(0, dtype=torch.float32)
                if len(positions) < ctx.context:
                    positions = F.pad(positions, (0, 0, 0, ctx.context - len(positions)))
        if ctx.tied is None:
            tokens = torch.zeros(ctx.vocabulary, width, dtype=torch.float32, device=gradient.device)
        else:
            tokens = ctx.tied.read()
        _embed_backward[(triton.cdiv(rows, tile["ROWS"]),)](ids, gradient, tokens, rows, width, **tile)
        if ctx.side is not None:
            ctx.side.synchronize()  # autograd adds the gradients of whoever shares the matrix right after this
        return None, tokens, positions, None, None


def plain_embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """The reference, in torch's operations."""
    embedded = F.embedding(ids, tokens)
    return (embedded if positions is None else embedded + positions[: ids.shape[1]]).flatten(0, 1)


@triton.jit
def fast_exp2(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^x; NVIDIA's approximate instruction has a relative error of about 2^-22 and flushes tiny results to 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def row_log_sum_exp(  # type: ignore[no-untyped-def]
    start, columns, FAST: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr
):
    """The logarithm of the summed exponentials of a row of logits."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    offsets = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    lane_max = tl.full([LANES], -1e30, tl.float32)  # finite: a lane may have no elements, and inf - inf is NaN
    total = tl.zeros([LANES], tl.float32)
    for begin in range(0, columns, LANES * PER_LANE):
        mask = begin + offsets < columns
        logit = tl.load(start + begin + offsets, mask=mask, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, tl.max(logit, 1))
        exponentials = fast_exp2(logit * LOG2_E - (new_max * LOG2_E)[:, None], FAST)
        total = total * fast_exp2((lane_max - new_max) * LOG2_E, FAST) + tl.sum(exponentials, 1)
        lane_max = new_max
    new_max = tl.max(lane_max, 0)
    return new_max + tl.log(tl.sum(total * fast_exp2((lane_max - new_max) * LOG2_E, FAST), 0))


@triton.jit
def clear_row(start, columns, LANES: tl.constexpr, PER_LANE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros: the gradient of a row that has no label."""
    offsets = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    for begin in range(0, columns, LANES * PER_LANE):
        zeros = tl.zeros([LANES, PER_LANE], start.dtype.element_ty)
        tl.store(start + begin + offsets, zeros, mask=begin + offsets < columns)


@triton.jit
def _logits_to_gradient(  # type: ignore[no-untyped-def]
    logits, labels, count, losses, columns, stride, IGNORED: tl.constexpr, FAST: tl.constexpr,
    LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * PER_LANE
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    inverse_count = 1.0 / tl.load(count)
    start = logits + row * stride
    # Loaded here, since it is overwritten below.
    target_logit = tl.load(start + label, mask=label != IGNORED, other=0.0).to(tl.float32)
    offsets = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    if label == IGNORED:
        clear_row(start, columns, LANES, PER_LANE)
        tl.store(losses + row, 0.0)
        return
    lse = row_log_sum_exp(start, columns, FAST, LANES, PER_LANE)
    tl.store(losses + row, (lse - target_logit) * inverse_count)
    label = label.to(tl.int32)
    for begin in range(0, columns, BLOCK):
        mask = begin + offsets < columns
        logit = tl.load(start + begin + offsets, mask=mask, other=-float("inf")).to(tl.float32)
        probability = fast_exp2(logit * LOG2_E - lse * LOG2_E, FAST)
        gradient = tl.where(begin + offsets == label, probability - 1.0, probability)
        tl.store(start + begin + offsets, (gradient * inverse_count).to(logits.dtype.element_ty), mask=mask)


@triton.jit
def _scale(values, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    scale = tl.load(factor)
    if scale == 1.0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + offsets, mask=offsets < size).to(tl.float32) * scale
    tl.store(values + offsets, x.to(values.dtype.element_ty), mask=offsets < size)


def logits_to_gradient_(logits: Tensor, labels: Tensor, count: Tensor, ignored: int) -> Tensor:
    """Losses [rows] of logits [rows, vocabulary], divided by `count`; the logits become their gradient."""
    losses = torch.empty(len(labels), device=logits.device, dtype=torch.float32)
    _logits_to_gradient[(len(labels),)](
        logits, labels, count, losses, logits.shape[1], logits.stride(0),
        ignored, is_nvidia(logits), 32 * WARPS, PER_LANE, num_warps=WARPS,
    )  # fmt: skip
    return losses


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place by a number on the device. If it is 1, as the gradient of a loss mostly is, nothing is read."""
    _scale[(triton.cdiv(values.numel(), BLOCK),)](values, factor, values.numel(), BLOCK, num_warps=8)
    return values


def head_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a head's stream and its weight, from that of its logits: the backward pass of all losses."""
    gradient, hidden, cast = ctx.saved_tensors
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    weight_gradient = None
    if needs_weight:
        side = side_if_small(ctx.side, hidden)
        # The side stream holds no reference to the result: autograd would copy it, before it is complete.
        with on_side(side, gradient, hidden, upstream):
            weight_gradient = scale_(product(gradient.t(), hidden, ctx.weight_dtype), upstream)
        if ctx.tied is not None:
            ctx.tied.write(weight_gradient, side)
            weight_gradient = None
    hidden_gradient = scale_(tuned_product(gradient, cast), upstream) if needs_hidden else None
    return hidden_gradient, weight_gradient


class HeadLoss(torch.autograd.Function):
    """hidden [rows, width], weight [vocabulary, width], its cast or None, labels [rows], count [] -> summed loss /
    count.

    The product is computed in the type of `hidden`, the weight gradient in the type of the weight. With `tied`, the
    weight gradient is deferred.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, cast: Tensor | None, labels: Tensor, count: Tensor, ignored: int,
        tied: DeferredGradient | None,
    ) -> Tensor:  # fmt: skip
        ctx.weight_dtype, ctx.side, ctx.tied = weight.dtype, current_side_stream(), tied
        cast = weight.to(hidden.dtype) if cast is None else cast
        logits = tuned_product(hidden, cast, transposed=True)
        loss = logits_to_gradient_(logits, labels, count, ignored).sum()
        ctx.save_for_backward(logits, hidden, cast)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *head_gradients(ctx, upstream), *[None] * 5
