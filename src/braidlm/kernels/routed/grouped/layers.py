"""Linear and feed-forward layers with weights for each expert, on rows sorted by expert.

They read low-precision copies of their weights and compute float32 weight gradients, on the side stream if there is
one. Upstream gradients must be zero in the padding rows of used tiles.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.activation import plain_activation
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse, dropout_into
from braidlm.kernels.ops.launch import MIN_BLOCK
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.combine import DeferredDispatch, UncombinedSum, combine
from braidlm.kernels.routed.grouped.products import grouped_backward, grouped_forward, plain_grouped
from braidlm.kernels.routed.grouped.sums import expert_sums
from braidlm.kernels.routed.grouped.weights import Gathered, grouped_weight_gradient
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.side_stream import SideStream, current_side_stream, on_side

TOKENS, CHANNELS, WARPS = 32, 64, 4
"""For the gradients of weights: a program's block of tokens, its step over channels, and its warps."""
Gradients = tuple[Tensor | None, Tensor | None]
"""The gradients of a layer's matrices and biases."""


class GroupedLinear(Function):
    """rows [R, in], or tokens [N, in] to be gathered, through the layer of each row's expert -> [R, out].

    weight [E, in, out], its cast, a bias [E, out] or None.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, cast: Tensor, bias: Tensor | None, permutation: Permutation,
        gather: bool, slot: GradientSlot | None = None,
    ) -> Tensor:  # fmt: skip
        check_slot(slot, rows)
        ctx.save_for_backward(rows, cast)
        ctx.permutation, ctx.gather, ctx.side, ctx.slot = permutation, gather, current_side_stream(), slot
        return grouped_forward(rows, cast, permutation, bias, gather)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, cast), permutation, gradient = ctx.saved_tensors, ctx.permutation, gradient.contiguous()
        needs_rows, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        parameters: Gradients = (None, None)
        if needs_weight or needs_bias:
            gathered: Gathered | None = "inputs" if ctx.gather else None
            parameters = parameter_gradients(ctx.side, ctx.slot, rows, gradient, permutation, gathered, needs_bias)
        rows_gradient = gradient_of_rows(gradient, cast, permutation, ctx.gather) if needs_rows else None
        return rows_gradient, parameters[0], None, parameters[1], *[None] * 3


@dataclass(frozen=True)
class FeedConfig:
    """What the feed-forward parts of experts need to know beside their tensors: whether rows are tokens to be gathered,
    dropout of the output and of the activation, and the slots of both layers.

    With `deferred`, which the router has that passed tokens on, it takes the gradients of tokens and weights. With
    `uncombined` the weighted sum is not computed: what is returned stands for it.
    """

    permutation: Permutation
    kind: str
    gated: bool
    gather: bool = True
    dropout: DropoutUse = NO_DROPOUT
    inner_dropout: DropoutUse = NO_DROPOUT
    up_slot: GradientSlot | None = None
    out_slot: GradientSlot | None = None
    deferred: DeferredDispatch | None = None
    uncombined: UncombinedSum | None = None
    side: SideStream | None = field(default_factory=current_side_stream, init=False)


class GroupedFeed(Function):
    """rows [R, in], or tokens [N, in] to be gathered, through the feed-forward part of each row's expert -> [R, out].

    up weight [E, in, hidden] (gated: [E, in, 2 hidden], gate and up concatenated), its cast, a bias as wide or None;
    out weight [E, hidden, out], its cast, a bias [E, out] or None. With `base` [R, out], the output is added to it
    after dropout.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, up_weight: Tensor, up_cast: Tensor, up_bias: Tensor | None, out_weight: Tensor,
        out_cast: Tensor, out_bias: Tensor | None, base: Tensor | None, config: FeedConfig,
    ) -> Tensor:  # fmt: skip
        target = None if config.out_slot is None else config.out_slot.input
        value, inner = _activated(ctx, rows, up_cast, up_bias, config, target)
        ctx.save_for_backward(rows, inner, value, up_cast, out_cast)
        ctx.config, ctx.has_base = config, base is not None
        return grouped_forward(value, out_cast, config.permutation, out_bias, base=base, dropout=config.dropout)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, inner, value, up_cast, out_cast), config = ctx.saved_tensors, ctx.config
        permutation, out_slot, gradient = config.permutation, config.out_slot, gradient.contiguous()
        needs_rows, _, _, needs_bias, needs_out, _, needs_out_bias = ctx.needs_input_grad[:7]
        base_gradient, rows_gradient = gradient if ctx.has_base else None, None
        if config.dropout.probability:
            target = torch.empty_like(gradient) if out_slot is None else out_slot.gradient
            gradient = dropout_into(gradient, config.dropout, target)
        out: Gradients = (None, None)
        if needs_out or needs_out_bias:
            out = parameter_gradients(config.side, out_slot, value, gradient, permutation, None, needs_out_bias)
        inner_gradient, sums, _ = grouped_backward(
            gradient, out_cast, permutation, inner, config.kind, config.gated,
            out=None if config.up_slot is None else config.up_slot.gradient, summed=needs_bias,
            dropout=config.inner_dropout,
        )  # fmt: skip
        up = _up_gradients(ctx, rows, inner_gradient, sums)
        if needs_rows:
            rows_gradient = gradient_of_rows(inner_gradient, up_cast, permutation, config.gather)
        return rows_gradient, up[0], None, up[1], out[0], None, out[1], base_gradient, None


class CombinedFeed(Function):
    """tokens [N, in] through the feed-forward parts of their experts, combined -> [N, out], added to `base`.

    Matrices and biases as in `GroupedFeed`; weights [N, K] of each token's choices.

    Known together, layers and weighted sum need less: the gradient of a token's sum is gathered where the experts'
    products read it, and never written for each row; and the gradient of a row's weight, its projection on the gradient
    of the sum, is computed from the narrower input of the last product, so that rows are not kept for the backward
    pass. That input, times the weight, is written again there for the gradient of the matrix.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, up_weight: Tensor, up_cast: Tensor, up_bias: Tensor | None, out_weight: Tensor,
        out_cast: Tensor, out_bias: Tensor | None, weights: Tensor, base: Tensor | None, config: FeedConfig,
    ) -> Tensor:  # fmt: skip
        permutation = config.permutation
        value, inner = _activated(ctx, tokens, up_cast, up_bias, config)
        rows, _ = grouped_forward(value, out_cast, permutation, out_bias)
        row_weights = weights.new_empty(permutation.rows, dtype=torch.float32) if any(ctx.needs_input_grad) else None
        inputs = (rows, weights.contiguous(), permutation, base, row_weights)
        if config.uncombined is None:
            combined = combine(*inputs)
        else:
            combined, config.uncombined.inputs = rows.new_empty(len(tokens), rows.shape[1]), inputs
        ctx.save_for_backward(tokens, inner, up_cast, out_cast, out_bias, row_weights)
        ctx.config, ctx.weights_type, ctx.has_base = config, weights.dtype, base is not None
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens, inner, up_cast, out_cast, out_bias, row_weights), config = ctx.saved_tensors, ctx.config
        permutation, side, deferred = config.permutation, config.side, config.deferred
        needs_tokens, _, _, needs_bias, needs_out, _, needs_out_bias, needs_weights = ctx.needs_input_grad[:8]
        gradient, tokens_gradient, weights_gradient = gradient.contiguous(), None, None
        slot = config.out_slot
        weighted = tokens.new_empty(len(inner), out_cast.shape[1]) if slot is None else slot.input
        inner_gradient, sums, projections = grouped_backward(
            gradient, out_cast, permutation, inner, config.kind, config.gated,
            out=torch.empty_like(inner) if config.up_slot is None else config.up_slot.gradient, summed=needs_bias,
            dropout=config.inner_dropout, row_weights=row_weights, weighted=weighted,
        )  # fmt: skip
        out: Gradients = (None, None)
        if needs_out or needs_out_bias:
            out = parameter_gradients(
                side, slot, weighted, gradient, permutation, "gradients", needs_out_bias, row_weights
            )
        up = _up_gradients(ctx, tokens, inner_gradient, sums)
        if needs_weights and deferred is None:
            weights_gradient = weights_of(projections, gradient, out_bias, permutation).to(ctx.weights_type)
        elif needs_weights:
            with on_side(side, projections, gradient, *permutation.tables, priority=True):  # type: ignore[arg-type]
                deferred_gradient = weights_of(projections, gradient, out_bias, permutation)
            deferred.weights.write(deferred_gradient, side)
        if needs_tokens and deferred is None:
            tokens_gradient = gradient_of_rows(inner_gradient, up_cast, permutation, True)
        elif needs_tokens:
            deferred.rows = gradient_of_rows(inner_gradient, up_cast, permutation, False), permutation.row_of_choice
        gradients = (tokens_gradient, up[0], None, up[1], out[0], None, out[1], weights_gradient)
        return *gradients, gradient if ctx.has_base else None, None


@triton.jit
def _weights_gradient(  # type: ignore[no-untyped-def]
    projections, gradient, bias, row_of_choice, tile_expert, out, tokens, rows, experts,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, PADDED_CHOICES: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The sum of each row's projections, and, where the layer has a bias, the bias's own projection."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < tokens
    choice = tl.arange(0, PADDED_CHOICES)[None, :]
    mask = token_mask[:, None] & (choice < CHOICES)
    row = tl.load(row_of_choice + token[:, None] * CHOICES + choice, mask=mask, other=0)
    total = tl.zeros([TOKENS, PADDED_CHOICES], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(projections + part * rows + row, mask=mask, other=0.0)
    if bias is not None:
        own = tl.load(tile_expert + row // TILE, mask=mask, other=0)
        expert = tl.arange(0, EXPERTS)
        of_bias = tl.zeros([TOKENS, EXPERTS], tl.float32)
        for begin in range(0, WIDTH, CHANNELS):
            channel = begin + tl.arange(0, CHANNELS)
            channel_mask = channel < WIDTH
            dy = tl.load(
                gradient + token.to(tl.int64)[:, None] * WIDTH + channel[None, :],
                mask=token_mask[:, None] & channel_mask[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                bias + expert[None, :] * WIDTH + channel[:, None],
                mask=channel_mask[:, None] & (expert < experts)[None, :], other=0.0,
            )  # fmt: skip
            of_bias = tl.dot(dy, b.to(dy.dtype), of_bias, input_precision="ieee")  # float32 would be ten times slower
        is_own = own[:, :, None] == expert[None, None, :]
        total += tl.sum(tl.where(is_own, of_bias[:, None, :], 0.0), 2)
    tl.store(out + token[:, None] * CHOICES + choice, total, mask=mask)


def weights_of(projections: Any, gradient: Tensor, bias: Tensor | None, permutation: Permutation) -> Tensor:
    """The gradients [N, K] of weights from the projections [parts, R] of rows without their layer's bias."""
    (tokens, choices), width = permutation.row_of_choice.shape, gradient.shape[1]
    out = projections.new_empty(tokens, choices)
    experts = max(MIN_BLOCK, triton.next_power_of_2(permutation.experts))
    _weights_gradient[(triton.cdiv(tokens, TOKENS),)](
        projections, gradient, bias, permutation.row_of_choice, permutation.tile_expert, out, tokens,
        permutation.rows, permutation.experts,
        width, choices, triton.next_power_of_2(choices), len(projections), permutation.tile, TOKENS, experts, CHANNELS,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def _activated(
    ctx: Any, rows: Tensor, cast: Tensor, bias: Tensor | None, config: FeedConfig, target: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The value of the activation, in the buffer `target` if there is one, and its input if something is trained."""
    check_slot(config.up_slot, rows)
    return grouped_forward(
        rows, cast, config.permutation, bias, config.gather, config.kind, config.gated, dropout=config.inner_dropout,
        value=target, keep_inner=any(ctx.needs_input_grad),
    )  # fmt: skip


def _up_gradients(ctx: Any, rows: Tensor, gradient: Tensor, sums: Tensor | None) -> Gradients:
    """The gradients of the first layer's matrix and bias, from its inputs, the gradient of its outputs and the sums
    that are the bias's gradient, if it is needed."""
    config, bias_gradient, weight_gradient = ctx.config, None, None
    gathered: Gathered | None = "inputs" if config.gather else None
    if ctx.needs_input_grad[1]:
        weight_gradient, _ = parameter_gradients(
            config.side, config.up_slot, rows, gradient, config.permutation, gathered, False
        )
    if sums is not None:
        with on_side(config.side, sums, config.permutation.expert_offsets, priority=True):
            bias_gradient = expert_sums(sums, config.permutation)
    return weight_gradient, bias_gradient


def check_slot(slot: GradientSlot | None, rows: Tensor) -> None:
    assert slot is None or slot.input.data_ptr() == rows.data_ptr(), "the rows were not written into the slot"


def parameter_gradients(
    side: SideStream | None,
    slot: GradientSlot | None,
    rows: Tensor,
    gradient: Tensor,
    permutation: Permutation,
    gathered: Gathered | None,
    bias: bool,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of a layer's matrix and of its bias, if it has one: see `grouped_weight_gradient`."""
    if slot is not None:
        return slot.submit(gradient, permutation, row_weights)  # type: ignore[no-any-return]
    read = [x for x in (rows, gradient, row_weights, *permutation.tables) if x is not None]
    with on_side(side, *read):
        return grouped_weight_gradient(rows, gradient, permutation, gathered, bias, row_weights=row_weights)


def gradient_of_rows(gradient: Tensor, cast: Tensor, permutation: Permutation, gather: bool) -> Tensor:
    """The gradient of a layer's inputs, which are sorted rows, or tokens that were gathered."""
    rows_gradient, *_ = grouped_backward(gradient, cast, permutation)
    return combine(rows_gradient, None, permutation) if gather else rows_gradient


def plain_grouped_feed(
    rows: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    base: Tensor | None,
    config: FeedConfig,
    factors: Tensor | None = None,
) -> Tensor:
    """The reference of `GroupedFeed`, in torch's operations; dropout multiplies activations by factors [R, hidden]."""
    inner = plain_grouped(rows, up_weight, config.permutation, up_bias, config.gather)
    value = plain_activation(inner, None, config.kind, config.gated)
    out = plain_grouped(value if factors is None else value * factors, out_weight, config.permutation, out_bias)
    return out if base is None else out + base
