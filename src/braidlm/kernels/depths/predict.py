"""The router that learns to tell from a token alone whether it enters, on the side stream: nothing waits for it.

Its first layer reads the stream as it is, and the scale of each token is applied to the product. Backward one kernel
computes the gradient of that product and sums those of all vectors; the stream has no gradient from here.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.activation import value_and_derivative
from braidlm.kernels.ops.launch import programs_for
from braidlm.kernels.ops.linear import product
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import current_side_stream, on_side
from braidlm.model.mixture_of_depths import DEPTH_CHOICES

CHOICES = len(DEPTH_CHOICES)
VECTORS = 1 + CHOICES
"""Vectors of the inner size that are summed backward: the gradients of the inner bias and of the scores' weights."""
ELEMENTS, WARPS = 4096, 4
PROGRAMS_PER_SM = 2


@triton.jit
def _predict(  # type: ignore[no-untyped-def]
    inner, scales, inner_bias, weight, bias, places, scores, probabilities, chosen, rows, hidden,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    column = tl.arange(0, COLUMNS)
    column_mask = column < hidden
    mask = row_mask[:, None] & column_mask[None, :]
    x = tl.load(inner + row.to(tl.int64)[:, None] * hidden + column[None, :], mask=mask, other=0.0).to(tl.float32)
    x = x * tl.load(scales + row, mask=row_mask, other=0.0)[:, None]
    x += tl.load(inner_bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    value, _ = value_and_derivative(x, "gelu", False)
    first_weight = tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + hidden + column, mask=column_mask, other=0.0).to(tl.float32)
    first = tl.sum(value * first_weight[None, :], 1) + tl.load(bias).to(tl.float32)
    second = tl.sum(value * second_weight[None, :], 1) + tl.load(bias + 1).to(tl.float32)
    tl.store(scores + 2 * row, first, mask=row_mask)
    tl.store(scores + 2 * row + 1, second, mask=row_mask)
    tl.store(probabilities + 2 * row, tl.sigmoid(first - second), mask=row_mask)
    tl.store(probabilities + 2 * row + 1, tl.sigmoid(second - first), mask=row_mask)
    passes_by = tl.load(places + row, mask=row_mask, other=0) < 0
    tl.store(chosen + row, passes_by.to(tl.int64), mask=row_mask)


@triton.jit
def _predict_backward(  # type: ignore[no-untyped-def]
    inner, scales, inner_bias, weight, scores, scores_gradient, probabilities_gradient, gradient, sums, rows, hidden,
    VECTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    column_mask = column < hidden
    b = tl.load(inner_bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    first_weight = tl.load(weight + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    second_weight = tl.load(weight + hidden + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    inner_bias_sum = tl.zeros([COLUMNS], tl.float32)
    first_sum = tl.zeros([COLUMNS], tl.float32)
    second_sum = tl.zeros([COLUMNS], tl.float32)
    first_bias_sum = tl.zeros([ROWS], tl.float32)
    second_bias_sum = tl.zeros([ROWS], tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = begin + tl.arange(0, ROWS)
        row_mask = row < rows
        first = tl.zeros([ROWS], tl.float32)
        second = tl.zeros([ROWS], tl.float32)
        if scores_gradient is not None:
            first += tl.load(scores_gradient + 2 * row, mask=row_mask, other=0.0)
            second += tl.load(scores_gradient + 2 * row + 1, mask=row_mask, other=0.0)
        if probabilities_gradient is not None:
            difference = tl.load(scores + 2 * row, mask=row_mask, other=0.0)
            difference -= tl.load(scores + 2 * row + 1, mask=row_mask, other=0.0)
            through = tl.load(probabilities_gradient + 2 * row, mask=row_mask, other=0.0)
            through -= tl.load(probabilities_gradient + 2 * row + 1, mask=row_mask, other=0.0)
            through *= tl.sigmoid(difference) * tl.sigmoid(-difference)
            first += through
            second -= through
        scale = tl.load(scales + row, mask=row_mask, other=0.0)[:, None]
        mask = row_mask[:, None] & column_mask[None, :]
        offsets = row.to(tl.int64)[:, None] * hidden + column[None, :]
        x = tl.load(inner + offsets, mask=mask, other=0.0).to(tl.float32) * scale + b
        value, derivative = value_and_derivative(x, "gelu", False)
        x_gradient = (first[:, None] * first_weight + second[:, None] * second_weight) * derivative
        tl.store(gradient + offsets, (x_gradient * scale).to(gradient.dtype.element_ty), mask=mask)
        inner_bias_sum += tl.sum(x_gradient, 0)
        first_sum += tl.sum(first[:, None] * value, 0)
        second_sum += tl.sum(second[:, None] * value, 0)
        first_bias_sum += first
        second_bias_sum += second
    sums += program * (VECTORS * hidden + 2)
    tl.store(sums + column, inner_bias_sum, mask=column_mask)
    tl.store(sums + hidden + column, first_sum, mask=column_mask)
    tl.store(sums + 2 * hidden + column, second_sum, mask=column_mask)
    tl.store(sums + VECTORS * hidden, tl.sum(first_bias_sum, 0))
    tl.store(sums + VECTORS * hidden + 1, tl.sum(second_bias_sum, 0))


class Predict(torch.autograd.Function):
    """stream [tokens, width], the tokens' scales, weight [hidden, width], its cast, bias [hidden], the scores' weight
    [2, hidden] and bias [2], places -> scores, probabilities [tokens, 2], what was chosen and its weight [tokens, 1].

    Everything is complete when the side stream is synchronized. `slot` belongs to the first layer.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, scales: Tensor, inner_weight: Tensor, cast: Tensor, inner_bias: Tensor,
        weight: Tensor, bias: Tensor, places: Tensor, slot: GradientSlot | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert slot is None or slot.input.data_ptr() == stream.data_ptr()
        tokens, hidden, side = len(stream), len(inner_weight), current_side_stream()
        with on_side(side, stream, scales, cast, places):
            inner = stream @ cast.t()
            scores = torch.empty(tokens, CHOICES, dtype=torch.float32, device=stream.device)
            probabilities = torch.empty_like(scores)
            chosen = torch.empty(tokens, 1, dtype=torch.int64, device=stream.device)
            weights = scores.new_ones(tokens, 1)  # of a single choice, normalised
            tile = _tile(hidden)
            _predict[(triton.cdiv(tokens, tile["ROWS"]),)](
                inner, scales, inner_bias, weight, bias, places, scores, probabilities, chosen, tokens, hidden, **tile
            )
        ctx.save_for_backward(stream, scales, inner_bias, weight, inner, scores)
        ctx.side, ctx.slot, ctx.weight_dtype = side, slot, inner_weight.dtype
        ctx.mark_non_differentiable(chosen, weights)
        ctx.set_materialize_grads(False)
        return scores, probabilities, chosen, weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, scores_gradient: Tensor | None, probabilities_gradient: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        stream, scales, inner_bias, weight, inner, scores = ctx.saved_tensors
        tokens, hidden = inner.shape
        upstream = [x if x is None else x.contiguous() for x in (scores_gradient, probabilities_gradient)]
        tile = _tile(hidden)
        programs = programs_for(inner.device, PROGRAMS_PER_SM, triton.cdiv(tokens, tile["ROWS"]))
        gradient = torch.empty_like(inner) if ctx.slot is None else ctx.slot.gradient
        held = [x for x in (*upstream, stream, scales, inner, scores, gradient) if x is not None]
        with on_side(ctx.side, *held):
            sums = scores.new_empty(programs, VECTORS * hidden + CHOICES)
            _predict_backward[(programs,)](
                inner, scales, inner_bias, weight, scores, *upstream, gradient, sums, tokens, hidden, VECTORS, **tile
            )
            totals = sums.sum(0)
            inner_gradient = product(gradient.t(), stream, ctx.weight_dtype) if ctx.slot is None else None
        if ctx.slot is not None:
            inner_gradient = ctx.slot.submit(gradient)
        inner_bias_gradient, weight_gradient, bias_gradient = totals.split((hidden, CHOICES * hidden, CHOICES))
        vectors = (inner_bias_gradient.data, weight_gradient.view_as(weight).data, bias_gradient.data)
        return None, None, inner_gradient, None, *vectors, None, None


def _tile(hidden: int) -> dict[str, int]:
    columns = triton.next_power_of_2(hidden)
    return {"ROWS": max(1, ELEMENTS // columns), "COLUMNS": columns, "num_warps": WARPS}


def plain_predict(
    stream: Tensor, scales: Tensor, inner_weight: Tensor, inner_bias: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference, in torch's operations: scores and probabilities."""
    scores = F.linear(F.gelu(F.linear(stream * scales[:, None], inner_weight, inner_bias)), weight, bias)
    return scores, scores.softmax(-1)
