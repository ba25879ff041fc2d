"""Adding to the stream, normalising it and routing it: one pass over memory forward and one backward.

What `fused_norm` and `fused_router` do one after the other, for routers with few choices: backward, a program holds a
sum for each of them. Where the stream is a weighted sum of sorted rows, which `fused_mix` makes, that is done in the
pass forward as well.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import Sums
from braidlm.kernels.ops.dropout import apply_dropout, threshold
from braidlm.kernels.ops.launching import programs_for
from braidlm.kernels.ops.norm import plain_add_norm
from braidlm.kernels.ops.router import choose, leave_sums, plain_route, score_gradient, scores_of
from braidlm.kernels.routed.combine import combine_gradients, combined_rows
from braidlm.kernels.routed.gradient_stacks import GroupedGradientSlot
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.side_stream import DeferredGradient

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

MOST_CHOICES = 8
NUMBERS = 512
"""Numbers a warp works on at once."""
VECTORS = 3
"""Summed backward: for the norm's scale, for its bias, for the bias of the layer before (some may not be wanted)."""
PROGRAMS_PER_PROCESSOR, TILES_PER_PROGRAM = 16, 4
"""At most and at least, backward: each program leaves sums behind, so it should have some rows to sum."""


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    stream, delta, delta_bias, mixed, mix_weights, slots, weight, bias, router, router_bias, balance, seed,
    summed, normed, means, inverses, scores, probabilities, chosen, weights, rows, width, choices, eps, keep_scale,
    CENTRED: tl.constexpr, READS_NORMED: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    THRESHOLD: tl.constexpr, MIXED: tl.constexpr, MIXED_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    real = (column < width)[None, :]
    inside = (row < rows)[:, None] & real
    offsets = row.to(tl.int64)[:, None] * width + column[None, :]
    if MIXED:
        x = combined_rows(
            mixed, mix_weights, slots, row.to(tl.int64), row < rows, inside, column[None, :], MIXED_WIDTH, MIXED
        )
    else:
        x = tl.load(stream + offsets, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        added = tl.load(delta + offsets, mask=inside, other=0.0).to(tl.float32)
        if delta_bias is not None:
            added += tl.load(delta_bias + column[None, :], mask=real, other=0.0).to(tl.float32)
        x += apply_dropout(added, seed, offsets, keep_scale, THRESHOLD)
    if MIXED or delta is not None:
        rounded = x.to(summed.dtype.element_ty)
        tl.store(summed + offsets, rounded, mask=inside)
        x = tl.where(inside, rounded.to(tl.float32), 0.0)
    y = x
    if CENTRED:
        mean = tl.sum(x, 1) / width
        tl.store(means + row, mean, mask=row < rows)
        y = tl.where(inside, x - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(y * y, 1) / width + eps)
    tl.store(inverses + row, inverse, mask=row < rows)
    y = y * inverse[:, None]
    if weight is not None:
        y *= tl.load(weight + column[None, :], mask=real, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + column[None, :], mask=real, other=0.0).to(tl.float32)
    narrow = y.to(normed.dtype.element_ty)
    tl.store(normed + offsets, narrow, mask=inside)
    read = x
    if READS_NORMED:
        read = tl.where(inside, narrow.to(tl.float32), 0.0)
    s = scores_of(read, router, router_bias, width, choices, COLUMNS, CHOICES)
    choose(
        s, balance, scores, probabilities, chosen, weights, row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES
    )  # fmt: skip


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    normed_gradient, summed_gradient, summed, weight, bias, means, inverses, router, probabilities, chosen, weights,
    weights_gradient, probabilities_gradient, scores_gradient, seed, gradient, delta_gradient, sums, rows, width,
    choices, keep_scale,
    CENTRED: tl.constexpr, DELTA_BIASED: tl.constexpr, READS_NORMED: tl.constexpr, THRESHOLD: tl.constexpr,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, VECTORS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    real = (column < width)[None, :]
    matrix = router + choice[:, None] * width + column[None, :]
    r = tl.load(matrix, mask=(choice < choices)[:, None] & real, other=0.0)
    if weight is not None:
        w = tl.load(weight + column[None, :], mask=real, other=0.0).to(tl.float32)
    if bias is not None:
        b = tl.load(bias + column[None, :], mask=real, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    delta_bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    router_sum = tl.zeros([CHOICES, ROWS, COLUMNS], tl.float32)
    router_bias_sum = tl.zeros([CHOICES, ROWS], tl.float32)
    for begin in range(program * ROWS, rows, programs * ROWS):
        row = (begin + tl.arange(0, ROWS)).to(tl.int64)
        exists = row < rows
        inside = exists[:, None] & real
        offsets = row[:, None] * width + column[None, :]
        ds = score_gradient(
            probabilities, chosen, weights, weights_gradient, probabilities_gradient, scores_gradient,
            row, rows, choices, TOP_K, RENORMALISE, ROWS, CHOICES,
        )  # fmt: skip
        x = tl.load(summed + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(normed_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row, mask=exists, other=0.0)[:, None]
        y = x
        if CENTRED:
            y -= tl.load(means + row, mask=exists, other=0.0)[:, None]
        y = tl.where(inside, y * inverse, 0.0)
        read = x
        routed = tl.sum(ds[:, :, None] * r[:, None, :], 0)
        if READS_NORMED:
            read = y
            if weight is not None:
                read = y * w
            if bias is not None:
                read = read + b
            read = tl.where(inside, read, 0.0)
            dy += routed
        router_sum += ds[:, :, None] * read[None, :, :]
        router_bias_sum += ds
        dx = dy
        if weight is not None:
            weight_sum += dy * y
            dx = dy * w
        if bias is not None:
            bias_sum += tl.where(inside, dy, 0.0)
        along = tl.sum(dx * y, 1)[:, None] / width
        if CENTRED:
            dx -= tl.sum(dx, 1)[:, None] / width
        dx = (dx - y * along) * inverse
        if not READS_NORMED:
            dx += routed
        if summed_gradient is not None:
            dx += tl.load(summed_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(gradient + offsets, dx.to(gradient.dtype.element_ty), mask=inside)
        if THRESHOLD:
            dx = apply_dropout(dx, seed, offsets, keep_scale, THRESHOLD)
            tl.store(delta_gradient + offsets, dx.to(delta_gradient.dtype.element_ty), mask=inside)
        if DELTA_BIASED:
            delta_bias_sum += tl.where(inside, dx, 0.0)
    sums += program * (VECTORS * width + choices * (width + 1))
    if weight is not None:
        tl.store(sums + column, tl.sum(weight_sum, 0), mask=column < width)
    if bias is not None:
        tl.store(sums + width + column, tl.sum(bias_sum, 0), mask=column < width)
    if DELTA_BIASED:
        tl.store(sums + 2 * width + column, tl.sum(delta_bias_sum, 0), mask=column < width)
    leave_sums(sums + VECTORS * width, router_sum, router_bias_sum, width, choices, COLUMNS, CHOICES)


@dataclass(frozen=True)
class NormRouteConfig:
    """What norm and router do, where their gradients are summed, and whose slots are pending.

    The router reads the stream, or, `reads_normed`, the stream normalised. What is added may be dropped by chance.
    `normed_slot` is of the layer that reads the normalised stream, `delta_slot` of the one that made what is added.
    Who reads the stream leaves its gradient in `deferred`, if that is there.
    """

    eps: float
    centred: bool
    reads_normed: bool
    top_k: int
    renormalise: bool
    sums: Sums
    normed_slot: GradientSlot | GroupedGradientSlot | None = None
    delta_slot: GradientSlot | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    deferred: DeferredGradient | None = None


class AddNormRoute(torch.autograd.Function):
    """stream, delta [rows, width] (or None), three vectors [width] (or None), the router's weight [choices, width], its
    bias and balance [choices] (or None) -> the sum, the sum normalised, scores, probabilities, chosen, weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        delta: Tensor | None,
        delta_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        router: Tensor,
        router_bias: Tensor | None,
        balance: Tensor | None,
        config: NormRouteConfig,
    ) -> tuple[Tensor, ...]:
        ctx.adds, ctx.delta_biased = delta is not None, delta_bias is not None
        summed = stream if delta is None else torch.empty_like(stream)
        vectors = (weight, bias, router, router_bias, balance)
        return _norm_and_route(ctx, config, summed, (stream, delta, delta_bias), (None, None, None, 0), vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gradient, delta, delta_bias, vectors = _gradients(ctx, saved, *gradients)
        return gradient, delta if ctx.adds else None, delta_bias, *vectors, None, None


class CombineNormRoute(torch.autograd.Function):
    """The same of a stream that is yet to be mixed: rows [R, width], weights [N, K] as for `Combine`.

    `slot` is of the layer that made the rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        permutation: Permutation,
        slot: GroupedGradientSlot | None,
        weight: Tensor | None,
        bias: Tensor | None,
        router: Tensor,
        router_bias: Tensor | None,
        balance: Tensor | None,
        config: NormRouteConfig,
    ) -> tuple[Tensor, ...]:
        rows, weights = rows.contiguous(), weights.contiguous()
        ctx.permutation, ctx.slot, ctx.delta_biased = permutation, slot, False
        (tokens, choices), width = permutation.row_of_choice.shape, rows.shape[1]
        mixed = (rows, weights, permutation.row_of_choice, choices)
        vectors = (weight, bias, router, router_bias, balance)
        return _norm_and_route(ctx, config, rows.new_empty(tokens, width), (None, None, None), mixed, vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gradient, _, _, vectors = _gradients(ctx, saved, *gradients)
        rows, weights = saved[-2:]
        made = combine_gradients(gradient, rows, weights, ctx.permutation, ctx.slot)
        return *made, None, None, *vectors, None, None


def _norm_and_route(
    ctx: Any,
    config: NormRouteConfig,
    summed: Tensor,
    added: tuple[Tensor | None, ...],
    mixed: tuple[Tensor | int | None, ...],
    vectors: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    weight, bias, router, router_bias, _ = vectors
    assert router is not None
    (rows, width), choices = summed.shape, len(router)
    normed = torch.empty_like(summed) if config.normed_slot is None else config.normed_slot.input
    inverses = torch.empty(rows, dtype=torch.float32, device=summed.device)
    means = torch.empty_like(inverses) if config.centred else None
    scores = inverses.new_empty(rows, choices)
    probabilities, weights = torch.empty_like(scores), scores.new_empty(rows, config.top_k)
    chosen = torch.empty(rows, config.top_k, dtype=torch.int64, device=summed.device)
    tile = _tile(width, choices)
    _forward[(triton.cdiv(rows, tile["ROWS"]),)](
        *added, *mixed[:3], *vectors, config.seed,
        summed, normed, means, inverses, scores, probabilities, chosen, weights, rows, width, choices, config.eps,
        1 / (1 - config.dropout), config.centred, config.reads_normed, config.top_k, config.renormalise, threshold(config.dropout),
        mixed[3], width, **tile,
    )  # fmt: skip
    ctx.save_for_backward(summed, weight, bias, means, inverses, router, probabilities, chosen, weights, *mixed[:2])
    ctx.config, ctx.router_biased = config, router_bias is not None
    ctx.mark_non_differentiable(chosen)
    ctx.set_materialize_grads(False)
    return summed, normed, scores, probabilities, chosen, weights


def _gradients(
    ctx: Any,
    saved: tuple[Any, ...],
    summed_gradient: Tensor | None,
    normed_gradient: Tensor,
    scores: Tensor | None,
    probabilities: Tensor | None,
    __: None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """Of the stream, of what was added and of its bias, of the norm's and the router's weight and bias."""
    summed, weight, bias, means, inverses, router, saved_probabilities, chosen, saved_weights, *_ = saved
    (rows, width), choices, config = summed.shape, len(router), ctx.config
    if config.deferred is not None:
        assert summed_gradient is None, "it is deferred"
        summed_gradient = config.deferred.read()
    delta_gradient = torch.empty_like(summed) if config.delta_slot is None else config.delta_slot.gradient
    gradient = torch.empty_like(summed) if config.dropout else delta_gradient
    tile = _tile(width, choices)
    tiles = triton.cdiv(rows, tile["ROWS"] * TILES_PER_PROGRAM)
    programs = programs_for(summed.device, PROGRAMS_PER_PROCESSOR, tiles)
    many = VECTORS if weight is not None or bias is not None or ctx.delta_biased else 0
    sums = config.sums.buffer(programs, many * width + choices * (width + 1), summed.device)
    given = [x if x is None else x.contiguous() for x in (weights, probabilities, scores)]
    _backward[(programs,)](
        normed_gradient.contiguous(), None if summed_gradient is None else summed_gradient.contiguous(), summed,
        weight, bias, means, inverses, router, saved_probabilities, chosen, saved_weights, *given, config.seed, gradient,
        delta_gradient, sums, rows, width, choices, 1 / (1 - config.dropout), config.centred, ctx.delta_biased,
        config.reads_normed, threshold(config.dropout), config.top_k, config.renormalise, many, **tile,
    )  # fmt: skip
    total = config.sums.total()
    vectors, routers = total[: many * width].view(many, width), total[many * width :]
    return (
        gradient,
        delta_gradient,
        vectors[2].data if ctx.delta_biased else None,
        (
            vectors[0].data if weight is not None else None,
            vectors[1].data if bias is not None else None,
            routers[: choices * width].view(choices, width).data,
            routers[choices * width :].data if ctx.router_biased else None,
        ),
    )


def _tile(width: int, choices: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    warps = max(1, min(16, columns // NUMBERS))
    most = triton.next_power_of_2(choices)
    return {"ROWS": max(1, NUMBERS // columns), "COLUMNS": columns, "CHOICES": most, "num_warps": warps}


def plain_add_norm_route(
    stream: Tensor,
    delta: Tensor | None,
    delta_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    router: Tensor,
    router_bias: Tensor | None,
    balance: Tensor | None,
    eps: float,
    centred: bool,
    reads_normed: bool,
    top_k: int,
    renormalise: bool,
) -> tuple[Tensor, ...]:
    """The reference, in torch's operations."""
    summed, normed = plain_add_norm(stream, delta, delta_bias, weight, bias, eps, centred)
    read = normed if reads_normed else summed
    return summed, normed, *plain_route(read, router, router_bias, balance, top_k, renormalise)[1:]
