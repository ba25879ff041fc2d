"""Feed-forward experts of tokens, and the weighted sum of what a token's experts say, as one function.

Known together, they need less: the gradient of a token's sum is gathered where the experts' products read it, and never
written for each row; and the gradient of a row's weight, its projection on the gradient of the sum, is computed from
the narrower input of the last product, so that rows are not kept for the backward pass. That input, times the weight,
is written again there for the gradient of the matrix.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.ops.launch import MIN_BLOCK
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.combine import DeferredDispatch, combine, plain_combine
from braidlm.kernels.routed.combine_norm import UncombinedSum
from braidlm.kernels.routed.grouped.layers import check_slot, gradient_of_rows, parameter_gradients, plain_grouped_feed
from braidlm.kernels.routed.grouped.products import combined_backward, grouped_forward
from braidlm.kernels.routed.grouped.sums import expert_sums
from braidlm.kernels.routed.grouped.weights import grouped_weight_gradient
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.side_stream import current_side_stream, on_side, use_side_stream

TOKENS, CHANNELS, WARPS = 32, 64, 4
"""A program's block of tokens, its step over channels, and its warps."""


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


class CombinedFeed(Function):
    """tokens [N, in] through the feed-forward parts of their experts, combined -> [N, out], added to `base`.

    Matrices and biases as in `GroupedFeed`, and dropout of the activation; weights [N, K] of each token's choices. With
    `deferred`, which the router has that passed the tokens on, the gradients of tokens and weights are left there. With
    `uncombined` the sum is not computed: what is returned stands for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        up_weight: Tensor,
        up_cast: Tensor,
        up_bias: Tensor | None,
        out_weight: Tensor,
        out_cast: Tensor,
        out_bias: Tensor | None,
        weights: Tensor,
        base: Tensor | None,
        permutation: Permutation,
        kind: str,
        gated: bool,
        dropout: DropoutUse = NO_DROPOUT,
        up_slot: GradientSlot | None = None,
        out_slot: GradientSlot | None = None,
        deferred: DeferredDispatch | None = None,
        uncombined: UncombinedSum | None = None,
    ) -> Tensor:
        check_slot(up_slot, tokens)
        trains = any(ctx.needs_input_grad)
        value, inner = grouped_forward(
            tokens, up_cast, permutation, up_bias, True, kind, gated, dropout=dropout, keep_inner=trains
        )
        rows, _ = grouped_forward(value, out_cast, permutation, out_bias)
        row_weights = weights.new_empty(permutation.rows, dtype=torch.float32) if trains else None
        inputs = (rows, weights.contiguous(), permutation, base, row_weights)
        if uncombined is None:
            combined = combine(*inputs)
        else:
            combined, uncombined.inputs = rows.new_empty(len(tokens), rows.shape[1]), inputs
        ctx.save_for_backward(tokens, inner, up_cast, out_cast, out_bias, row_weights)
        ctx.permutation, ctx.kind, ctx.gated, ctx.side = permutation, kind, gated, current_side_stream()
        ctx.up_slot, ctx.out_slot, ctx.deferred, ctx.dropout = up_slot, out_slot, deferred, dropout
        ctx.weights_type, ctx.has_base = weights.dtype, base is not None
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens, inner, up_cast, out_cast, out_bias, row_weights), permutation = ctx.saved_tensors, ctx.permutation
        needs_tokens, needs_up, _, needs_bias, needs_out, _, needs_out_bias, needs_weights = ctx.needs_input_grad[:8]
        gradient, tokens_gradient = gradient.contiguous(), None
        up_gradient = bias_gradient = weights_gradient = None
        out_gradients: tuple[Tensor | None, Tensor | None] = (None, None)
        weighted = tokens.new_empty(len(inner), out_cast.shape[1]) if ctx.out_slot is None else ctx.out_slot.input
        inner_gradient = torch.empty_like(inner) if ctx.up_slot is None else ctx.up_slot.gradient
        sums, projections = combined_backward(
            gradient,
            row_weights,
            out_cast,
            permutation,
            inner,
            ctx.kind,
            ctx.gated,
            weighted,
            inner_gradient,
            needs_bias,
            ctx.dropout,
        )
        if needs_out or needs_out_bias:
            with use_side_stream(ctx.side):
                out_gradients = _out_gradients(
                    ctx.out_slot, weighted, gradient, row_weights, permutation, needs_out_bias
                )
        if needs_up:
            with use_side_stream(ctx.side):
                up_gradient, _ = parameter_gradients(ctx.up_slot, tokens, inner_gradient, permutation, True, False)
        if sums is not None:
            with on_side(ctx.side, sums, permutation.expert_offsets, priority=True):
                bias_gradient = expert_sums(sums, permutation)
        if needs_weights and ctx.deferred is None:
            weights_gradient = weights_of(projections, gradient, out_bias, permutation).to(ctx.weights_type)
        elif needs_weights:
            read = (projections, gradient, permutation.row_of_choice, permutation.tile_expert)
            with on_side(ctx.side, *read, priority=True):
                deferred_gradient = weights_of(projections, gradient, out_bias, permutation)
            ctx.deferred.weights.write(deferred_gradient, ctx.side)
        if needs_tokens and ctx.deferred is None:
            tokens_gradient = gradient_of_rows(inner_gradient, up_cast, permutation, True)
        elif needs_tokens:
            rows_gradient = gradient_of_rows(inner_gradient, up_cast, permutation, False)
            ctx.deferred.rows = rows_gradient, permutation.row_of_choice
        gradients = (tokens_gradient, up_gradient, None, bias_gradient, out_gradients[0], None, out_gradients[1])
        return *gradients, weights_gradient, gradient if ctx.has_base else None, *[None] * 8


def weights_of(projections: Tensor, gradient: Tensor, bias: Tensor | None, permutation: Permutation) -> Tensor:
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


def _out_gradients(
    slot: GradientSlot | None,
    weighted: Tensor,
    gradient: Tensor,
    row_weights: Tensor,
    permutation: Permutation,
    bias: bool,
) -> tuple[Tensor, Tensor | None]:
    if slot is not None:
        return slot.submit(gradient, permutation, row_weights)  # type: ignore[no-any-return]
    places = (permutation.source, permutation.expert_offsets, permutation.row_of_choice, permutation.tile_expert)
    with on_side(current_side_stream(), weighted, gradient, row_weights, *places):
        return grouped_weight_gradient(weighted, gradient, permutation, "gradients", bias, row_weights=row_weights)


def plain_combined_feed(
    tokens: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    weights: Tensor,
    base: Tensor | None,
    permutation: Permutation,
    kind: str,
    gated: bool,
    factors: Tensor | None = None,
) -> Tensor:
    """The reference, in torch's operations; for factors see `plain_grouped_feed`."""
    rows = plain_grouped_feed(
        tokens, up_weight, up_bias, out_weight, out_bias, None, permutation, kind, gated, True, factors
    )
    combined = plain_combine(rows, weights, permutation)
    return combined if base is None else combined + base
