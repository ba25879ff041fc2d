"""A router's scores, softmax and top k: one pass over memory forward and one backward.

The pass backward also sums the gradients of the router's weight and bias.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import Sums
from braidlm.kernels.ops.launching import programs_for

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS, WARPS = 512, 4
"""Numbers of the stream that a warp works on at once: a row never waits for another warp if it fits into one."""
PROGRAMS_PER_PROCESSOR, TILES_PER_PROGRAM = 8, 2
"""At most and at least, backward: each program leaves sums behind, so it should have some rows to sum."""


@triton.jit
def scores_of(  # type: ignore[no-untyped-def]
    x, weight, bias, width, choices, COLUMNS: tl.constexpr, CHOICES: tl.constexpr
):
    """[choice, row] of x [row, column]: choices come first, so that sums over the width stay within a warp."""
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    real = choice < choices
    matrix = weight + choice[:, None] * width + column[None, :]
    w = tl.load(matrix, mask=real[:, None] & (column < width)[None, :], other=0.0)
    s = tl.sum(x[None, :, :] * w[:, None, :], 2)
    if bias is not None:
        s += tl.load(bias + choice, mask=real, other=0.0)[:, None]
    return s


@triton.jit
def choose(  # type: ignore[no-untyped-def]
    s, balance, scores, probabilities, chosen, weights, row, rows, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Scores [choice, row] to probabilities, the top k and what they count; all stored."""
    exists = row < rows
    choice = tl.arange(0, CHOICES)
    real = choice < choices
    inside = exists[None, :] & real[:, None]
    offsets = row.to(tl.int64)[None, :] * choices + choice[:, None]
    tl.store(scores + offsets, s, mask=inside)
    s = tl.where(real[:, None], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 0)[None, :])
    p = p / tl.sum(p, 0)[None, :]
    tl.store(probabilities + offsets, p, mask=inside)
    ranked = s
    if balance is not None:
        ranked = p + tl.load(balance + choice, mask=real, other=0.0)[:, None]
        ranked = tl.where(real[:, None], ranked, float("-inf"))
    total = tl.zeros([ROWS], tl.float32)
    left = ranked
    for _ in tl.static_range(TOP_K):
        mine = choice[:, None] == tl.argmax(left, 0)[None, :]
        total += tl.sum(tl.where(mine, p, 0.0), 0)
        left = tl.where(mine, float("-inf"), left)
    left = ranked
    for k in tl.static_range(TOP_K):
        best = tl.argmax(left, 0)
        mine = choice[:, None] == best[None, :]
        left = tl.where(mine, float("-inf"), left)
        value = tl.sum(tl.where(mine, p, 0.0), 0)
        if RENORMALISE:
            value = value / total
        tl.store(chosen + row.to(tl.int64) * TOP_K + k, best.to(tl.int64), mask=exists)
        tl.store(weights + row.to(tl.int64) * TOP_K + k, value, mask=exists)


@triton.jit
def score_gradient(  # type: ignore[no-untyped-def]
    probabilities, chosen, weights, weights_gradient, probabilities_gradient, scores_gradient, row, rows, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """[choice, row] from the gradients of weights, probabilities and scores, each there or not."""
    exists = row < rows
    choice = tl.arange(0, CHOICES)
    inside = exists[None, :] & (choice < choices)[:, None]
    offsets = row[None, :] * choices + choice[:, None]
    p = tl.load(probabilities + offsets, mask=inside, other=0.0)
    dp = tl.zeros([CHOICES, ROWS], tl.float32)
    if probabilities_gradient is not None:
        dp += tl.load(probabilities_gradient + offsets, mask=inside, other=0.0)
    if weights_gradient is not None:
        along = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if RENORMALISE:
            for k in tl.static_range(TOP_K):
                at = row * TOP_K + k
                mine = choice[:, None] == tl.load(chosen + at, mask=exists, other=-1)[None, :]
                total += tl.sum(tl.where(mine, p, 0.0), 0)
                dw = tl.load(weights_gradient + at, mask=exists, other=0.0)
                along += dw * tl.load(weights + at, mask=exists, other=0.0)
            total = tl.where(exists, total, 1.0)
        for k in tl.static_range(TOP_K):
            at = row * TOP_K + k
            mine = choice[:, None] == tl.load(chosen + at, mask=exists, other=-1)[None, :]
            dw = tl.load(weights_gradient + at, mask=exists, other=0.0)
            if RENORMALISE:
                dw = (dw - along) / total
            dp += tl.where(mine, dw[None, :], 0.0)
    ds = p * (dp - tl.sum(p * dp, 0)[None, :])
    if scores_gradient is not None:
        ds += tl.load(scores_gradient + offsets, mask=inside, other=0.0)
    return tl.where(inside, ds, 0.0)


@triton.jit
def leave_sums(  # type: ignore[no-untyped-def]
    sums, weight_sum, bias_sum, width, choices, COLUMNS: tl.constexpr, CHOICES: tl.constexpr
):
    """Of the router's weight and bias: what a program found, [choice, row, column] and [choice, row], over its rows."""
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    inside = (choice < choices)[:, None] & (column < width)[None, :]
    tl.store(sums + choice[:, None] * width + column[None, :], tl.sum(weight_sum, 1), mask=inside)
    tl.store(sums + choices * width + choice, tl.sum(bias_sum, 1), mask=choice < choices)


@triton.jit
def _route_forward(  # type: ignore[no-untyped-def]
    stream, weight, bias, balance, scores, probabilities, chosen, weights, rows, width, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(stream + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    s = scores_of(x, weight, bias, width, choices, COLUMNS, CHOICES)
    choose(s, balance, scores, probabilities, chosen, weights, row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES)


@triton.jit
def _route_backward(  # type: ignore[no-untyped-def]
    stream, weight, probabilities, chosen, weights, stream_gradient, weights_gradient, probabilities_gradient,
    scores_gradient, gradient, sums, rows, width, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    real = choice < choices
    matrix = weight + choice[:, None] * width + column[None, :]
    w = tl.load(matrix, mask=real[:, None] & (column < width)[None, :], other=0.0)
    weight_sum = tl.zeros([CHOICES, ROWS, COLUMNS], tl.float32)
    bias_sum = tl.zeros([CHOICES, ROWS], tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        ds = score_gradient(
            probabilities, chosen, weights, weights_gradient, probabilities_gradient, scores_gradient,
            row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES,
        )  # fmt: skip
        at = row[:, None] * width + column[None, :]
        there = (row < rows)[:, None] & (column < width)[None, :]
        x = tl.load(stream + at, mask=there, other=0.0).to(tl.float32)
        dx = tl.sum(ds[:, :, None] * w[:, None, :], 0)
        if stream_gradient is not None:
            dx += tl.load(stream_gradient + at, mask=there, other=0.0).to(tl.float32)
        tl.store(gradient + at, dx.to(gradient.dtype.element_ty), mask=there)
        weight_sum += ds[:, :, None] * x[None, :, :]
        bias_sum += ds
    leave_sums(sums + program * choices * (width + 1), weight_sum, bias_sum, width, choices, COLUMNS, CHOICES)


class Route(torch.autograd.Function):
    """stream [rows, width], weight [choices, width], bias [choices] or None, balance [choices] or None
    -> the stream, scores, probabilities [rows, choices], chosen, weights [rows, top_k].

    Who reads the stream that is given back adds its gradient at no cost. `slot` is of the layer whose output's
    gradient is the stream's.
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
        sums: Sums,
        slot: GradientSlot | None = None,
    ) -> tuple[Tensor, ...]:
        (rows, width), choices = stream.shape, len(weight)
        scores = torch.empty(rows, choices, dtype=torch.float32, device=stream.device)
        probabilities, weights = torch.empty_like(scores), scores.new_empty(rows, top_k)
        chosen = torch.empty(rows, top_k, dtype=torch.int64, device=stream.device)
        tile = _tile(width, choices)
        _route_forward[(triton.cdiv(rows, tile["ROWS"]),)](
            stream, weight, bias, balance, scores, probabilities, chosen, weights, rows, width, choices,
            top_k, renormalise, **tile,
        )  # fmt: skip
        ctx.save_for_backward(stream, weight, probabilities, chosen, weights)
        ctx.renormalise, ctx.sums, ctx.biased, ctx.slot = renormalise, sums, bias is not None, slot
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return stream.view_as(stream), scores, probabilities, chosen, weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        above: Tensor | None,
        scores: Tensor | None,
        probabilities: Tensor | None,
        _: None,
        weights: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        stream, weight, saved_probabilities, chosen, saved_weights = ctx.saved_tensors
        (rows, width), choices = stream.shape, len(weight)
        tile = _tile(width, choices)
        tiles = triton.cdiv(rows, tile["ROWS"] * TILES_PER_PROGRAM)
        programs = programs_for(stream.device, PROGRAMS_PER_PROCESSOR, tiles)
        gradient = torch.empty_like(stream) if ctx.slot is None else ctx.slot.gradient
        sums = ctx.sums.buffer(programs, choices * (width + 1), stream.device)
        given = (x if x is None else x.contiguous() for x in (above, weights, probabilities, scores))
        _route_backward[(programs,)](
            stream, weight, saved_probabilities, chosen, saved_weights, *given, gradient, sums, rows, width, choices,
            chosen.shape[1], ctx.renormalise, **tile,
        )  # fmt: skip
        total = ctx.sums.total()
        weight_gradient = total[: choices * width].view(choices, width).data
        bias_gradient = total[choices * width :].data if ctx.biased else None
        return gradient, weight_gradient, bias_gradient, *[None] * 5


def _tile(width: int, choices: int) -> dict[str, int]:
    columns, most = triton.next_power_of_2(width), triton.next_power_of_2(choices)
    # Backward a program holds a sum of its rows for every choice, in registers: with many, it has fewer rows.
    numbers = max(NUMBERS, min(NUMBERS * WARPS, 4 * NUMBERS * WARPS // most))
    return {"ROWS": max(1, numbers // columns), "COLUMNS": columns, "CHOICES": most, "num_warps": WARPS}


def plain_route(
    stream: Tensor, weight: Tensor, bias: Tensor | None, balance: Tensor | None, top_k: int, renormalise: bool
) -> tuple[Tensor, ...]:
    """The reference, in torch's operations."""
    scores = F.linear(stream, weight, bias)
    probabilities = scores.softmax(-1)
    ranked = scores if balance is None else probabilities + balance
    chosen = ranked.topk(top_k, dim=-1).indices
    weights = probabilities.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) if renormalise else weights
    return stream, scores, probabilities, chosen, weights
