"""Adding to the stream, normalising it and routing it: one pass over memory forward and one backward.

This is `AddNorm` followed by `Route`, for routers with few choices (`MAX_FEW`): in the backward pass a program holds a
sum for each of them. The forward pass may also compute the stream, as the weighted sum of sorted rows (`Combine`). The
references are `plain_add_norm` and `plain_route`, one after the other.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.launch import programs_for, row_tile
from braidlm.kernels.ops.norm import (
    VECTORS,
    NormConfig,
    addition,
    norm_gradient,
    normalised,
    store_gradients,
    store_vector_sums,
    stored,
    tile_of_program,
)
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.choices import router_scores, score_gradient, select_top_k, store_sums
from braidlm.kernels.routed.combine import combine_gradients, combined_rows
from braidlm.kernels.routed.permutation import Permutation

PROGRAMS_PER_SM, TILES_PER_PROGRAM = 16, 4
"""A maximum and a minimum, backward: each program writes partial sums, so it should have some rows to sum."""


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    stream, delta, delta_bias, combined, combine_weights, row_of_choice, weight, bias, router, router_bias, balance,
    seed, summed, normed, means, rstds, scores, probabilities, chosen, weights, rows, width, choices, eps, keep_scale,
    CENTRED: tl.constexpr, READS_NORMED: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    THRESHOLD: tl.constexpr, COMBINED: tl.constexpr, COMBINED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    row, column, column_mask, mask, offsets = tile_of_program(rows, width, ROWS, COLUMNS)
    if COMBINED:
        x = combined_rows(
            combined, combine_weights, row_of_choice, row.to(tl.int64), row < rows, mask, column, COMBINED_WIDTH,
            COMBINED,
        )  # fmt: skip
    else:
        x = tl.load(stream + offsets, mask=mask, other=0.0).to(tl.float32)
    if delta is not None:
        x += addition(delta, delta_bias, seed, offsets, mask, column, column_mask, keep_scale, THRESHOLD)
    if COMBINED or delta is not None:
        x = tl.where(mask, stored(x, summed, offsets, mask), 0.0)
    y = normalised(x, weight, bias, means, rstds, row, rows, width, eps, column, column_mask, mask, CENTRED)
    rounded_normed = y.to(normed.dtype.element_ty)
    tl.store(normed + offsets, rounded_normed, mask=mask)
    read = x
    if READS_NORMED:
        read = tl.where(mask, rounded_normed.to(tl.float32), 0.0)
    s = router_scores(read, router, router_bias, width, choices, COLUMNS, CHOICES)
    select_top_k(
        s, balance, scores, probabilities, chosen, weights, row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES
    )  # fmt: skip


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    normed_gradient, summed_gradient, summed, weight, bias, means, rstds, router, probabilities, chosen,
    weights_gradient, probabilities_gradient, scores_gradient, seed, gradient, delta_gradient, sums, rows, width,
    choices, keep_scale,
    CENTRED: tl.constexpr, DELTA_BIASED: tl.constexpr, READS_NORMED: tl.constexpr, THRESHOLD: tl.constexpr,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, VECTORS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    column_mask = (column < width)[None, :]
    matrix = router + choice[:, None] * width + column[None, :]
    r = tl.load(matrix, mask=(choice < choices)[:, None] & column_mask, other=0.0)
    if weight is not None:
        w = tl.load(weight + column[None, :], mask=column_mask, other=0.0).to(tl.float32)
    if bias is not None:
        b = tl.load(bias + column[None, :], mask=column_mask, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    delta_bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    router_sum = tl.zeros([CHOICES, ROWS, COLUMNS], tl.float32)
    router_bias_sum = tl.zeros([CHOICES, ROWS], tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        row_mask = row < rows
        mask = row_mask[:, None] & column_mask
        offsets = row[:, None] * width + column[None, :]
        ds = score_gradient(
            probabilities, chosen, weights_gradient, probabilities_gradient, scores_gradient,
            row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES,
        )  # fmt: skip
        x = tl.load(summed + offsets, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(normed_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row, mask=row_mask, other=0.0)[:, None]
        y = x
        if CENTRED:
            y -= tl.load(means + row, mask=row_mask, other=0.0)[:, None]
        y = tl.where(mask, y * rstd, 0.0)
        read = x
        router_dx = tl.sum(ds[:, :, None] * r[:, None, :], 0)
        if READS_NORMED:
            read = y
            if weight is not None:
                read = y * w
            if bias is not None:
                read = read + b
            read = tl.where(mask, read, 0.0)
            dy += router_dx
        router_sum += ds[:, :, None] * read[None, :, :]
        router_bias_sum += ds
        dx = dy
        if weight is not None:
            weight_sum += dy * y
            dx = dy * w
        if bias is not None:
            bias_sum += tl.where(mask, dy, 0.0)
        dx = norm_gradient(dx, y, rstd, width, CENTRED)
        if not READS_NORMED:
            dx += router_dx
        if summed_gradient is not None:
            dx += tl.load(summed_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
        dx = store_gradients(dx, gradient, delta_gradient, seed, offsets, mask, keep_scale, THRESHOLD)
        if DELTA_BIASED:
            delta_bias_sum += tl.where(mask, dx, 0.0)
    offset = program * (VECTORS * width + choices * (width + 1))
    store_vector_sums(
        sums, offset, weight_sum, bias_sum, delta_bias_sum, width,
        weight is not None, bias is not None, DELTA_BIASED, COLUMNS,
    )  # fmt: skip
    store_sums(sums + offset + VECTORS * width, router_sum, router_bias_sum, width, choices, COLUMNS, CHOICES)


@dataclass(frozen=True, kw_only=True)
class NormRouteConfig(NormConfig):
    """Options of norm and router, whose gradients are summed together.

    The router reads the stream, or, `reads_normed`, the stream normalised. With `deferred`, the gradient of the sum
    comes from there.
    """

    reads_normed: bool
    top_k: int
    renormalise: bool
    permutation: Permutation | None = None
    """The permutation of a stream which is still to be combined."""
    rows_slot: GradientSlot | None = None
    """The slot of the layer that computed its rows."""


class AddNormRoute(torch.autograd.Function):
    """stream, delta [rows, width] (or None), three vectors [width] (or None), the router's weight [choices, width], its
    bias and balance [choices] (or None) -> the sum, the sum normalised, scores, probabilities, chosen, weights.

    Where the config has a permutation, the stream is still to be combined: rows [R, width] and weights [N, K], as for
    `Combine`, take the place of stream and delta.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, delta: Tensor | None, delta_bias: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, router: Tensor, router_bias: Tensor | None, balance: Tensor | None,
        config: NormRouteConfig,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.adds, ctx.delta_biased, ctx.router_biased = (
            delta is not None,
            delta_bias is not None,
            router_bias is not None,
        )
        inputs: tuple[Any, ...] = (stream, delta, delta_bias, None, None, None)
        experts = 0
        summed = stream if delta is None else torch.empty_like(stream)
        if config.permutation is not None:
            assert delta is not None
            rows, row_of_choice = stream.contiguous(), config.permutation.row_of_choice
            inputs, experts = (None, None, None, rows, delta.contiguous(), row_of_choice), row_of_choice.shape[1]
            summed = rows.new_empty(len(row_of_choice), rows.shape[1])
        (rows_read, width), choices = summed.shape, len(router)
        normed, means, rstds = config.outputs(summed)
        scores = rstds.new_empty(rows_read, choices)
        probabilities, weights = torch.empty_like(scores), scores.new_empty(rows_read, config.top_k)
        chosen = torch.empty(rows_read, config.top_k, dtype=torch.int64, device=summed.device)
        tile = _tile(width, choices)
        _forward[(triton.cdiv(rows_read, tile["ROWS"]),)](
            *inputs, weight, bias, router, router_bias, balance, config.dropout.seed,
            summed, normed, means, rstds, scores, probabilities, chosen, weights, rows_read, width, choices, config.eps,
            config.dropout.keep_scale, config.centred, config.reads_normed, config.top_k, config.renormalise,
            config.dropout.threshold, experts, width, **tile,
        )  # fmt: skip
        ctx.save_for_backward(summed, weight, bias, means, rstds, router, probabilities, chosen, *inputs[3:5])
        ctx.config = config
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return summed, normed, scores, probabilities, chosen, weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, summed_gradient: Tensor | None, normed_gradient: Tensor, scores: Tensor | None,
        probabilities: Tensor | None, _: None, weights: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        summed, weight, bias, means, rstds, router, saved_probabilities, chosen, *combined = ctx.saved_tensors
        (rows, width), choices, config = summed.shape, len(router), ctx.config
        if config.deferred is not None:
            assert summed_gradient is None, "the gradient of the sum is deferred"
            summed_gradient = config.deferred.read()
        gradient, delta_gradient = config.gradients(summed)
        tile = _tile(width, choices)
        programs = programs_for(summed.device, PROGRAMS_PER_SM, triton.cdiv(rows, tile["ROWS"] * TILES_PER_PROGRAM))
        vector_count = VECTORS if weight is not None or bias is not None or ctx.delta_biased else 0
        sums = config.sums.buffer(programs, vector_count * width + choices * (width + 1), summed.device)
        upstream = [x if x is None else x.contiguous() for x in (weights, probabilities, scores)]
        _backward[(programs,)](
            normed_gradient.contiguous(), None if summed_gradient is None else summed_gradient.contiguous(), summed,
            weight, bias, means, rstds, router, saved_probabilities, chosen, *upstream, config.dropout.seed,
            gradient, delta_gradient, sums, rows, width, choices, config.dropout.keep_scale, config.centred,
            ctx.delta_biased, config.reads_normed, config.dropout.threshold, config.top_k, config.renormalise,
            vector_count, **tile,
        )  # fmt: skip
        *vectors, router_gradient, router_bias_gradient = config.sums.total().split(
            [width] * vector_count + [choices * width, choices]
        )
        needed = (weight is not None, bias is not None, ctx.delta_biased)
        of_weight, of_bias, of_delta_bias = (vectors[i].data if needs else None for i, needs in enumerate(needed))
        first, second = gradient, delta_gradient if ctx.adds else None
        if config.permutation is not None:
            first, second = combine_gradients(gradient, combined[0], combined[1], config.permutation, config.rows_slot)
        return (
            first, second, of_delta_bias, of_weight, of_bias, router_gradient.view(choices, width).data,
            router_bias_gradient.data if ctx.router_biased else None, None, None,
        )  # fmt: skip


def _tile(width: int, choices: int) -> dict[str, int]:
    return row_tile(width) | {"CHOICES": triton.next_power_of_2(choices)}
