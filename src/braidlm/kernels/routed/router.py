"""A router's scores, softmax and top k: one pass over memory forward and one backward.

The backward pass also sums the gradients of the router's bias, and with few choices of its weight: with many, that is
a product of its own, beside the main stream.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.launch import programs_for
from braidlm.kernels.ops.linear import product, side_if_small
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.choices import (
    MAX_FEW,
    readers_gradient,
    router_scores,
    score_gradient,
    select_top_k,
    store_sums,
)
from braidlm.kernels.routed.combine import DeferredDispatch
from braidlm.kernels.side_stream import current_side_stream, on_side

ELEMENTS, WARPS = 512, 4
"""With few choices: elements of a warp's tile. A row that fits into one warp needs no synchronization with others."""
ROWS, COLUMNS = 64, 64
"""With many choices: the block of the stream that a program reads at once."""
BACKWARD_ROWS, BACKWARD_COLUMNS = 16, 128
"""Rows and columns of a program's block backward, where it has but one block."""
MIN_CHOICES = 16
"""A matrix product has no fewer rows; those beyond the choices are masked."""
PROGRAMS_PER_SM_FEW, TILES_PER_PROGRAM_FEW = 8, 2
"""A maximum and a minimum, backward: each program writes partial sums, so it should have some rows to sum."""


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
        dx = readers_gradient(
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
    weight, probabilities, chosen, stream_gradient, weights_gradient, probabilities_gradient, scores_gradient,
    rows_gradient, row_of_choice, gradient, all_scores_gradient, sums, rows, width, choices,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """The gradient of some columns: each program computes the gradient of the scores again, which is small.

    It is stored for a product with the stream, the gradient of the weight, which nothing on the main stream waits for.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    offsets = row[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & (column < width)[None, :]
    dx = readers_gradient(
        stream_gradient, rows_gradient, row_of_choice, row, rows, mask, offsets, column, width, TOP_K
    )  # fmt: skip
    ds = score_gradient(
        probabilities, chosen, weights_gradient, probabilities_gradient, scores_gradient,
        row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES,
    )  # fmt: skip
    weight_offsets = choice[:, None] * width + column[None, :]
    weight_mask = (choice < choices)[:, None] & (column < width)[None, :]
    narrow = ds.to(gradient.dtype.element_ty)  # computed in the type of the rows, as the gradients of all other layers
    w = tl.load(weight + weight_offsets, mask=weight_mask, other=0.0).to(narrow.dtype)
    dx += tl.dot(tl.trans(narrow), w, input_precision="ieee")
    tl.store(gradient + offsets, dx.to(gradient.dtype.element_ty), mask=mask)
    if tl.program_id(1) == 0:
        score_offsets = row[None, :] * choices + choice[:, None]
        tl.store(all_scores_gradient + score_offsets, narrow, mask=(row < rows)[None, :] & (choice < choices)[:, None])
        tl.store(sums + tl.program_id(0) * choices + choice, tl.sum(ds, 1), mask=choice < choices)


class Route(torch.autograd.Function):
    """stream [rows, width], weight [choices, width], bias [choices] or None, balance [choices] or None
    -> the stream, scores, probabilities [rows, choices], chosen, weights [rows, top_k].

    The stream is returned so that the gradient of its next reader is added in the same kernel. `slot` belongs to the
    layer whose output has the gradient of the stream, `scores_slot` to the scores, where there are many choices.
    `deferred` brings gradients past autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, weight: Tensor, bias: Tensor | None, balance: Tensor | None, top_k: int,
        renormalise: bool, sums: ColumnSums, slot: GradientSlot | None = None, deferred: DeferredDispatch | None = None,
        scores_slot: GradientSlot | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert scores_slot is None or scores_slot.input.data_ptr() == stream.data_ptr()
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
        ctx.deferred, ctx.scores_slot, ctx.side = deferred, scores_slot, current_side_stream()
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return stream.view_as(stream), scores, probabilities, chosen, weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, stream_gradient: Tensor | None, scores: Tensor | None, probabilities: Tensor | None, _: None,
        weights: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        stream, weight, saved_probabilities, chosen = ctx.saved_tensors
        gradient = torch.empty_like(stream) if ctx.slot is None else ctx.slot.gradient
        rows_gradient = row_of_choice = None
        if ctx.deferred is not None:
            weights = ctx.deferred.add_weights(weights)
            rows_gradient, row_of_choice = ctx.deferred.read_rows()
        upstream = [x if x is None else x.contiguous() for x in (stream_gradient, weights, probabilities, scores)]
        read = (weight, saved_probabilities, chosen, *upstream, rows_gradient, row_of_choice, gradient)
        (rows, width), choices, slot = stream.shape, len(weight), ctx.scores_slot
        options = (rows, width, choices, chosen.shape[1], ctx.renormalise)
        if choices <= MAX_FEW:
            block = _block(width, choices)
            tiles = triton.cdiv(rows, block["ROWS"] * TILES_PER_PROGRAM_FEW)
            programs = programs_for(stream.device, PROGRAMS_PER_SM_FEW, tiles)
            sums = ctx.sums.buffer(programs, choices * (width + 1), stream.device)
            _route_few_backward[(programs,)](stream, *read, sums, *options, **block)
            weight_gradient, bias_gradient = ctx.sums.total().split((choices * width, choices))
            weight_gradient, bias_gradient = weight_gradient.view(choices, width).data, bias_gradient.data
        else:  # a product computes the gradient of the weight: beside other work, if there is a side stream
            tiles = triton.cdiv(rows, BACKWARD_ROWS)
            scores_gradient = stream.new_empty(rows, choices) if slot is None else slot.gradient
            sums = ctx.sums.buffer(tiles, choices, stream.device)
            _route_backward[(tiles, triton.cdiv(width, BACKWARD_COLUMNS))](
                *read, scores_gradient, sums, *options, BACKWARD_ROWS, BACKWARD_COLUMNS,
                max(MIN_CHOICES, triton.next_power_of_2(choices)), num_warps=WARPS,
            )  # fmt: skip
            bias_gradient, weight_gradient = ctx.sums.total(), None
            if slot is not None:
                weight_gradient = slot.submit(scores_gradient)
            elif ctx.needs_input_grad[1]:
                with on_side(side_if_small(ctx.side, stream), scores_gradient, stream):
                    weight_gradient = product(scores_gradient.t(), stream, weight.dtype)
        return gradient, weight_gradient, bias_gradient if ctx.biased else None, *[None] * 7


def _block(width: int, choices: int) -> dict[str, int]:
    padded = triton.next_power_of_2(choices)
    if choices > MAX_FEW:
        return {"ROWS": ROWS, "COLUMNS": COLUMNS, "CHOICES": max(MIN_CHOICES, padded), "num_warps": WARPS}
    columns = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS * WARPS // columns)
    return {"ROWS": rows, "COLUMNS": columns, "CHOICES": padded, "num_warps": WARPS}


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


class RouterInner(torch.autograd.Function):
    """The first layer of a router of two: rows [rows, in], weight [hidden, in], bias [hidden] -> the activation
    [rows, hidden] in float32.

    Scores are to be as exact as float32 ones, since near ties decide which experts are chosen. The rows have 8 bits,
    and their product with the upper 8 bits of a weight, and with the next 8, is exact before it is added up in float32.
    So two half-precision products, computed as one, take the place of a float32 product that is ten times as slow.
    Gradients are computed in the type of the rows, as in all other layers.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        inner = _exact_product(rows, weight) + bias
        ctx.save_for_backward(rows, weight, inner)
        ctx.activation = activation
        return F.gelu(inner) if activation == "gelu" else F.relu(inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, inner = ctx.saved_tensors
        if ctx.activation == "gelu":
            inner_gradient = torch.ops.aten.gelu_backward(gradient, inner)
        else:
            inner_gradient = gradient * (inner > 0)
        narrow = inner_gradient.to(rows.dtype)
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return (
            narrow @ weight.to(rows.dtype) if needs_rows else None,
            product(narrow.t(), rows, weight.dtype) if needs_weight else None,
            inner_gradient.sum(0) if needs_bias else None,
            None,
        )


def _exact_product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight^T in float32."""
    if rows.dtype == weight.dtype:
        return product(rows, weight.t(), torch.float32)
    upper = weight.to(rows.dtype)
    lower = (weight - upper).to(rows.dtype)
    both = product(rows, torch.cat((upper, lower)).t(), torch.float32)
    return both[:, : len(weight)] + both[:, len(weight) :]


def plain_router_inner(rows: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    """The reference, in torch's operations."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    inner = F.linear(rows.to(wide), weight.to(wide), bias.to(wide))
    return F.gelu(inner) if activation == "gelu" else F.relu(inner)
