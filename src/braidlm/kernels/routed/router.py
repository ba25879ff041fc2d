"""A router's scores, softmax and top k: one pass over memory forward and one backward.

The backward pass also sums the gradients of the router's weight and bias.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.launch import programs_for, register_limit
from braidlm.kernels.routed.combine import DeferredDispatch, combined_rows

MAX_FEW = 8
"""Choices up to which a program that reads whole rows is faster (H200, LOG.md) than one that computes by blocks."""
ELEMENTS, WARPS = 512, 4
"""With few choices: elements of a warp's tile. A row that fits into one warp needs no synchronization with others."""
ROWS, COLUMNS = 64, 64
"""With many choices: the block of the stream that a program reads at once."""
MIN_CHOICES = 16
"""A matrix product has no fewer rows; those beyond the choices are masked."""
GATHERING_STAGES, GATHERING_REGISTERS = 2, 168
"""With many choices, where the backward pass also gathers rows: three programs still fit on a multiprocessor."""
PROGRAMS_PER_SM, PROGRAMS_PER_SM_FEW, TILES_PER_PROGRAM_FEW = 4, 8, 2
"""Maxima and a minimum, backward: each program writes partial sums, so it should have some rows to sum."""


@triton.jit
def router_scores(  # type: ignore[no-untyped-def]
    x, weight, bias, width, choices, COLUMNS: tl.constexpr, CHOICES: tl.constexpr
):
    """Scores [choice, row] of x [row, column]: choices come first, so that sums over the width stay within a warp."""
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    choice_mask = choice < choices
    matrix = weight + choice[:, None] * width + column[None, :]
    w = tl.load(matrix, mask=choice_mask[:, None] & (column < width)[None, :], other=0.0)
    s = tl.sum(x[None, :, :] * w[:, None, :], 2)
    if bias is not None:
        s += tl.load(bias + choice, mask=choice_mask, other=0.0)[:, None]
    return s


@triton.jit
def select_top_k(  # type: ignore[no-untyped-def]
    s, balance, scores, probabilities, chosen, weights, row, rows, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Store scores [choice, row], probabilities, the top k choices and their weights."""
    row_mask = row < rows
    choice = tl.arange(0, CHOICES)
    choice_mask = choice < choices
    mask = row_mask[None, :] & choice_mask[:, None]
    offsets = row.to(tl.int64)[None, :] * choices + choice[:, None]
    tl.store(scores + offsets, s, mask=mask)
    s = tl.where(choice_mask[:, None], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 0)[None, :])
    p = p / tl.sum(p, 0)[None, :]
    tl.store(probabilities + offsets, p, mask=mask)
    ranking = s
    if balance is not None:
        ranking = p + tl.load(balance + choice, mask=choice_mask, other=0.0)[:, None]
        ranking = tl.where(choice_mask[:, None], ranking, float("-inf"))
    place = tl.full([CHOICES, ROWS], -1, tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(ranking, 0)
        tl.store(chosen + row.to(tl.int64) * TOP_K + k, best.to(tl.int64), mask=row_mask)
        selected = choice[:, None] == best[None, :]
        place = tl.where(selected, k, place)
        ranking = tl.where(selected, float("-inf"), ranking)
    value = p
    if RENORMALISE:
        value = p / tl.sum(tl.where(place >= 0, p, 0.0), 0)[None, :]
    tl.store(weights + row.to(tl.int64)[None, :] * TOP_K + place, value, mask=row_mask[None, :] & (place >= 0))


@triton.jit
def score_gradient(  # type: ignore[no-untyped-def]
    probabilities, chosen, weights_gradient, probabilities_gradient, scores_gradient, row, rows, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """The gradient [choice, row] of the scores, from those of weights, probabilities and scores (each may be None)."""
    row_mask = row < rows
    choice = tl.arange(0, CHOICES)
    mask = row_mask[None, :] & (choice < choices)[:, None]
    offsets = row[None, :] * choices + choice[:, None]
    p = tl.load(probabilities + offsets, mask=mask, other=0.0)
    dp = tl.zeros([CHOICES, ROWS], tl.float32)
    if probabilities_gradient is not None:
        dp += tl.load(probabilities_gradient + offsets, mask=mask, other=0.0)
    if weights_gradient is not None:
        picked = tl.zeros([CHOICES, ROWS], tl.float32)
        dw = tl.zeros([CHOICES, ROWS], tl.float32)
        for k in tl.static_range(TOP_K):
            offset = row * TOP_K + k
            selected = choice[:, None] == tl.load(chosen + offset, mask=row_mask, other=-1)[None, :]
            picked += tl.where(selected, 1.0, 0.0)
            dw += tl.where(selected, tl.load(weights_gradient + offset, mask=row_mask, other=0.0)[None, :], 0.0)
        if RENORMALISE:  # weights are probabilities divided by the sum of those that were chosen
            chosen_p = p * picked
            total = tl.where(row_mask, tl.sum(chosen_p, 0), 1.0)
            projection = tl.sum(chosen_p * dw, 0) / total
            dw = picked * (dw - projection[None, :]) / total[None, :]
        dp += dw
    ds = p * (dp - tl.sum(p * dp, 0)[None, :])
    if scores_gradient is not None:
        ds += tl.load(scores_gradient + offsets, mask=mask, other=0.0)
    return tl.where(mask, ds, 0.0)


@triton.jit
def _readers_gradient(  # type: ignore[no-untyped-def]
    stream_gradient, rows_gradient, row_of_choice, row, rows, mask, offsets, column, width, TOP_K: tl.constexpr
):
    """The gradient that the stream's other readers have: one that is there, and one of sorted rows (each may be None).

    Kernels load it first, so that it is there when they have computed their own.
    """
    total = tl.zeros(mask.shape, tl.float32)
    if stream_gradient is not None:
        total += tl.load(stream_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    if rows_gradient is not None:
        total += combined_rows(rows_gradient, None, row_of_choice, row, row < rows, mask, column[None, :], width, TOP_K)
    return total


@triton.jit
def store_sums(  # type: ignore[no-untyped-def]
    sums, weight_sum, bias_sum, width, choices, COLUMNS: tl.constexpr, CHOICES: tl.constexpr
):
    """Store a program's gradients of weight [choice, row, column] and bias [choice, row], summed over its rows."""
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    mask = (choice < choices)[:, None] & (column < width)[None, :]
    tl.store(sums + choice[:, None] * width + column[None, :], tl.sum(weight_sum, 1), mask=mask)
    tl.store(sums + choices * width + choice, tl.sum(bias_sum, 1), mask=choice < choices)


@triton.jit
def _route_few_forward(  # type: ignore[no-untyped-def]
    stream, weight, bias, balance, scores, probabilities, chosen, weights, rows, width, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(stream + row.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    s = router_scores(x, weight, bias, width, choices, COLUMNS, CHOICES)
    select_top_k(
        s, balance, scores, probabilities, chosen, weights, row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES
    )


@triton.jit
def _route_few_backward(  # type: ignore[no-untyped-def]
    stream, weight, probabilities, chosen, stream_gradient, weights_gradient, probabilities_gradient,
    scores_gradient, rows_gradient, row_of_choice, gradient, sums, rows, width, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    choice_mask = choice < choices
    matrix = weight + choice[:, None] * width + column[None, :]
    w = tl.load(matrix, mask=choice_mask[:, None] & (column < width)[None, :], other=0.0)
    weight_sum = tl.zeros([CHOICES, ROWS, COLUMNS], tl.float32)
    bias_sum = tl.zeros([CHOICES, ROWS], tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        offset = row[:, None] * width + column[None, :]
        stream_mask = (row < rows)[:, None] & (column < width)[None, :]
        x = tl.load(stream + offset, mask=stream_mask, other=0.0).to(tl.float32)
        dx = _readers_gradient(
            stream_gradient, rows_gradient, row_of_choice, row, rows, stream_mask, offset, column, width, TOP_K
        )
        ds = score_gradient(
            probabilities, chosen, weights_gradient, probabilities_gradient, scores_gradient,
            row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES,
        )  # fmt: skip
        dx += tl.sum(ds[:, :, None] * w[:, None, :], 0)
        tl.store(gradient + offset, dx.to(gradient.dtype.element_ty), mask=stream_mask)
        weight_sum += ds[:, :, None] * x[None, :, :]
        bias_sum += ds
    store_sums(sums + program * choices * (width + 1), weight_sum, bias_sum, width, choices, COLUMNS, CHOICES)


@triton.jit
def _route_forward(  # type: ignore[no-untyped-def]
    stream, weight, bias, balance, scores, probabilities, chosen, weights, rows, width, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    choice = tl.arange(0, CHOICES)
    s = tl.zeros([CHOICES, ROWS], tl.float32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        x = tl.load(stream + row.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
        mask = (choice < choices)[:, None] & (column < width)[None, :]
        w = tl.load(weight + choice[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
        upper = w.to(x.dtype)
        s = tl.dot(upper, tl.trans(x), s, input_precision="ieee")
        if x.dtype != tl.float32:  # as exact as in float32, and several times as fast: see router_inner.py
            s = tl.dot((w - upper.to(tl.float32)).to(x.dtype), tl.trans(x), s)
    if bias is not None:
        s += tl.load(bias + choice, mask=choice < choices, other=0.0)[:, None]
    select_top_k(
        s, balance, scores, probabilities, chosen, weights, row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES
    )


@triton.jit
def _route_backward(  # type: ignore[no-untyped-def]
    stream, weight, probabilities, chosen, stream_gradient, weights_gradient, probabilities_gradient,
    scores_gradient, rows_gradient, row_of_choice, gradient, sums, rows, width, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Of some columns: each program computes the gradient of the scores again, which is small."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    weight_offsets = choice[:, None] * width + column[None, :]
    weight_mask = (choice < choices)[:, None] & (column < width)[None, :]
    w = tl.load(weight + weight_offsets, mask=weight_mask, other=0.0).to(stream.dtype.element_ty)
    weight_sum = tl.zeros([CHOICES, COLUMNS], tl.float32)
    bias_sum = tl.zeros([CHOICES, ROWS], tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        offsets = row[:, None] * width + column[None, :]
        mask = (row < rows)[:, None] & (column < width)[None, :]
        x = tl.load(stream + offsets, mask=mask, other=0.0)
        dx = _readers_gradient(
            stream_gradient, rows_gradient, row_of_choice, row, rows, mask, offsets, column, width, TOP_K
        )
        ds = score_gradient(
            probabilities, chosen, weights_gradient, probabilities_gradient, scores_gradient,
            row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES,
        )  # fmt: skip
        narrow = ds.to(x.dtype)  # gradients are computed in the type of the rows, as those of all other layers
        dx += tl.dot(tl.trans(narrow), w, input_precision="ieee")
        tl.store(gradient + offsets, dx.to(gradient.dtype.element_ty), mask=mask)
        weight_sum = tl.dot(narrow, x, weight_sum, input_precision="ieee")
        bias_sum += ds
    sums += program * choices * (width + 1)
    tl.store(sums + weight_offsets, weight_sum, mask=weight_mask)
    if tl.program_id(1) == 0:
        tl.store(sums + choices * width + choice, tl.sum(bias_sum, 1), mask=choice < choices)


class Route(torch.autograd.Function):
    """stream [rows, width], weight [choices, width], bias [choices] or None, balance [choices] or None
    -> the stream, scores, probabilities [rows, choices], chosen, weights [rows, top_k].

    The stream is returned so that the gradient of its next reader is added in the same kernel. `slot` belongs to the
    layer whose output has the gradient of the stream. `deferred` brings gradients past autograd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        balance: Tensor | None,
        top_k: int,
        renormalise: bool,
        sums: ColumnSums,
        slot: GradientSlot | None = None,
        deferred: DeferredDispatch | None = None,
    ) -> tuple[Tensor, ...]:
        (rows, width), choices = stream.shape, len(weight)
        scores = torch.empty(rows, choices, dtype=torch.float32, device=stream.device)
        probabilities, weights = torch.empty_like(scores), scores.new_empty(rows, top_k)
        chosen = torch.empty(rows, top_k, dtype=torch.int64, device=stream.device)
        block = _block(width, choices)
        kernel = _route_few_forward if choices <= MAX_FEW else _route_forward
        kernel[(triton.cdiv(rows, block["ROWS"]),)](
            stream, weight, bias, balance, scores, probabilities, chosen, weights, rows, width, choices,
            top_k, renormalise, **block,
        )  # fmt: skip
        ctx.save_for_backward(stream, weight, probabilities, chosen)
        ctx.renormalise, ctx.sums, ctx.biased, ctx.slot = renormalise, sums, bias is not None, slot
        ctx.deferred = deferred
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return stream.view_as(stream), scores, probabilities, chosen, weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        stream_gradient: Tensor | None,
        scores: Tensor | None,
        probabilities: Tensor | None,
        _: None,
        weights: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        stream, weight, saved_probabilities, chosen = ctx.saved_tensors
        (rows, width), choices = stream.shape, len(weight)
        block, few = _block(width, choices), choices <= MAX_FEW
        tiles, columns = triton.cdiv(rows, block["ROWS"]), triton.cdiv(width, block["COLUMNS"])
        if few:
            tiles = triton.cdiv(tiles, TILES_PER_PROGRAM_FEW)
        per_sm = PROGRAMS_PER_SM_FEW if few else PROGRAMS_PER_SM
        programs = programs_for(stream.device, per_sm, tiles, columns)
        gradient = torch.empty_like(stream) if ctx.slot is None else ctx.slot.gradient
        sums = ctx.sums.buffer(programs, choices * (width + 1), stream.device)
        rows_gradient = row_of_choice = None
        if ctx.deferred is not None:
            weights = ctx.deferred.add_weights(weights)
            rows_gradient, row_of_choice = ctx.deferred.read_rows()
        if rows_gradient is not None and not few:
            block |= {"num_stages": GATHERING_STAGES, **register_limit(GATHERING_REGISTERS)}
        upstream = (x if x is None else x.contiguous() for x in (stream_gradient, weights, probabilities, scores))
        (_route_few_backward if few else _route_backward)[(programs, columns)](
            stream, weight, saved_probabilities, chosen, *upstream, rows_gradient, row_of_choice, gradient, sums,
            rows, width, choices, chosen.shape[1], ctx.renormalise, **block,
        )  # fmt: skip
        total = ctx.sums.total()
        weight_gradient = total[: choices * width].view(choices, width).data
        bias_gradient = total[choices * width :].data if ctx.biased else None
        return gradient, weight_gradient, bias_gradient, *[None] * 6


def _block(width: int, choices: int) -> dict[str, int]:
    padded = triton.next_power_of_2(choices)
    if choices > MAX_FEW:
        return {"ROWS": ROWS, "COLUMNS": COLUMNS, "CHOICES": max(MIN_CHOICES, padded), "num_warps": WARPS}
    columns = triton.next_power_of_2(width)
    # In the backward pass a program holds a sum for every choice in registers: with more choices it has fewer rows.
    elements = max(ELEMENTS, min(ELEMENTS * WARPS, 4 * ELEMENTS * WARPS // padded))
    return {"ROWS": max(1, elements // columns), "COLUMNS": columns, "CHOICES": padded, "num_warps": WARPS}


def plain_route(
    stream: Tensor, weight: Tensor, bias: Tensor | None, balance: Tensor | None, top_k: int, renormalise: bool
) -> tuple[Tensor, ...]:
    """The reference, in torch's operations."""
    scores = F.linear(stream, weight, bias)
    probabilities = scores.softmax(-1)
    ranking = scores if balance is None else probabilities + balance
    chosen = ranking.topk(top_k, dim=-1).indices
    weights = probabilities.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) if renormalise else weights
    return stream, scores, probabilities, chosen, weights
