"""Routed parts by kernels: projections with experts, layers of routed blocks, attention and feed-forward experts.

Each function computes what the sparse forward of the module it is named after computes. Rows of the batch are flat.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, add_pending
from braidlm.kernels.dense_layers import Sublayer, activation_of, feed_forward, first_linear, inner_dropout
from braidlm.kernels.dispatching import (
    Dispatch,
    UncombinedRows,
    add_norm_route,
    combine_rows,
    route,
    routes_with_norm,
)
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.ops.fold import Folded
from braidlm.kernels.ops.linear import Linear
from braidlm.kernels.routed.attention import AttendRouted
from braidlm.kernels.routed.combine_norm import UncombinedSum
from braidlm.kernels.routed.combined_feed import CombinedFeed
from braidlm.kernels.routed.grouped.layers import GroupedFeed, GroupedLinear
from braidlm.kernels.routed.project_rows import MAX_WIDTH, ProjectAddNormRows
from braidlm.kernels.routed.rows import AddNormRows, Norm
from braidlm.kernels.side_stream import DeferredGradient
from braidlm.model.norms import LayerNorm
from braidlm.model.routing.routing import Routings


@dataclass
class Base:
    """Rows that the output of a feed-forward part is added to, after dropout."""

    rows: Tensor
    dropout: DropoutUse


def parallel_layer(
    stream: Tensor | UncombinedRows, pending: PendingAdd | None, layer: Any, context: PassContext
) -> tuple[UncombinedRows, None, Routings]:
    """Of a `ParallelLayer` with a routed join: the chosen blocks of each token, in sorted rows."""
    block, router = layer.stack[0], layer.join.router
    # The norm's kernel reads the stream's gradient itself where it also routes, for few choices.
    deferred = DeferredGradient() if routes_with_norm(router) else None
    stream, normed, dispatch = add_norm_route(
        stream, pending, block.attention_norm, router, block.attention.qkv, context, reads_normed=False, folded=True,
        deferred=deferred, permute_on_side=True,
    )  # fmt: skip
    bank, probability = block.attention, block.drop.probability
    attended = _attend(bank, normed, dispatch, context)
    norm = Norm(
        block.feed_norm.eps, isinstance(block.feed_norm, LayerNorm), probability, context.seed(block, probability),
        context.slots.get(first_linear(block.feed)), context.slots.get(bank.out), deferred,
    )  # fmt: skip
    if stream.shape[1] <= MAX_WIDTH:
        cast = context.casts[bank.out.weight]
        rows, normed = ProjectAddNormRows.apply(
            attended, bank.out.weight, cast, bank.out.bias, stream, dispatch.permutation, norm
        )
    else:
        delta = grouped_linear(bank.out, attended, dispatch, context, gather=False)
        rows, normed = AddNormRows.apply(stream, delta, dispatch.permutation, norm)
    base = Base(rows, DropoutUse(probability, context.seed(block, probability, 1)))
    fed = _grouped_feed(block.feed, normed, dispatch, context, base)
    slot = None if probability else context.slots.get(block.feed.out)
    return UncombinedRows(fed, dispatch.weights, dispatch.permutation, slot), None, (dispatch.routing,)


def projection_layer(
    stream: Tensor, pending: PendingAdd | None, stage: Any, context: PassContext
) -> tuple[Tensor, None, Routings]:
    """Of a `ProjectStage` with experts."""
    experts = stage.experts
    slot = None if pending is None or pending.dropout else pending.slot  # with dropout the gradients differ
    dispatch, stream = route(experts.router, add_pending(stream, pending), context, slot)
    if experts.gate_up is None:
        rows = grouped_linear(experts.out, stream, dispatch, context, gather=True)
    else:
        rows = _grouped_feed(experts, stream, dispatch, context)
    return combine_rows(rows, dispatch), None, (dispatch.routing,)


def routed_attention_sublayer(
    stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
) -> Sublayer:
    """Of `RoutedAttention`."""
    bank = part.bank
    stream, normed, dispatch = add_norm_route(
        stream, pending, norm, part.router, bank.qkv, context, reads_normed=True, permute_on_side=True
    )
    rows = grouped_linear(bank.out, _attend(bank, normed, dispatch, context), dispatch, context, gather=False)
    delta = combine_rows(part.drop(rows), dispatch, context.slots.get(bank.out))
    return stream, PendingAdd(delta), (dispatch.routing,)


def routed_feed_sublayer(
    stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
) -> Sublayer:
    """Of `RoutedFeed`."""
    reader, out_slot = first_linear(part.bank), context.slots.get(part.bank.out)
    stream, normed, dispatch = add_norm_route(
        stream, pending, norm, part.router, reader, context, reads_normed=True, permute_on_side=part.shared is not None
    )
    shared = None if part.shared is None else feed_forward(part.shared, normed, context)
    dispatch.wait()
    bias = None if shared is None else shared.bias
    if part.drop.probability:  # of each row, before the sum
        delta = combine_rows(part.drop(_grouped_feed(part.bank, normed, dispatch, context)), dispatch)
        return stream, PendingAdd(delta if shared is None else delta + shared.delta, bias), (dispatch.routing,)
    (up, out), (kind, gated) = _feed_matrices(part.bank, context), activation_of(part.bank)
    # Where gradients have slots no layer is computed again, which would need the sum without the next norm.
    uncombined = None if out_slot is None else UncombinedSum()
    delta = CombinedFeed.apply(
        normed, up.weight, up.cast, up.bias, out.weight, out.cast, out.bias, dispatch.weights,
        None if shared is None else shared.delta, dispatch.permutation, kind, gated, inner_dropout(part.bank, context),
        context.slots.get(reader), out_slot, dispatch.deferred, uncombined,
    )  # fmt: skip
    return stream, PendingAdd(delta, bias, out_slot, uncombined=uncombined), (dispatch.routing,)


def _attend(bank: Any, normed: Tensor, dispatch: Dispatch, context: PassContext) -> Tensor:
    """What the routed queries of a bank of attentions gather from all tokens' values, in sorted rows."""
    folded, permutation, slot = context.folded[bank.qkv], dispatch.permutation, context.slots.get(bank.qkv)
    qkv = Linear.apply(normed, folded.weight, folded.cast, folded.bias_cast, slot, True)
    dispatch.wait()
    probability, scale = bank.drop.probability, 1 / math.sqrt(bank.head_dim)
    return AttendRouted.apply(
        qkv.view(len(normed), bank.stack, 3, bank.heads, bank.head_dim), permutation.source,
        permutation.sequence_offsets, permutation.routed, scale, probability, context.seed(bank, probability),
        bank.window, None, folded.bias, context.sums_of(bank.qkv), slot, context.slots.get(bank.out),
    )  # fmt: skip


def grouped_linear(layer: Any, rows: Tensor, dispatch: Dispatch, context: PassContext, gather: bool) -> Tensor:
    """The layer of each row's expert; `rows` are tokens where they are to be gathered."""
    weight, bias = layer.rows()
    return GroupedLinear.apply(
        rows, weight, context.casts[layer.weight], bias, dispatch.permutation, gather,
        context.slots.get(layer),
    )  # fmt: skip


def _grouped_feed(
    bank: Any, rows: Tensor, dispatch: Dispatch, context: PassContext, base: Base | None = None
) -> Tensor:
    """The feed-forward part of each row's expert; `rows` are sorted rows where there is a base, and else tokens."""
    (up, out), (kind, gated) = _feed_matrices(bank, context), activation_of(bank)
    base_rows, dropout = (None, NO_DROPOUT) if base is None else (base.rows, base.dropout)
    return GroupedFeed.apply(
        rows, up.weight, up.cast, up.bias, out.weight, out.cast, out.bias, base_rows,
        dispatch.permutation, kind, gated, base is None, dropout, inner_dropout(bank, context),
        context.slots.get(first_linear(bank)), context.slots.get(bank.out),
    )  # fmt: skip


def _feed_matrices(bank: Any, context: PassContext) -> tuple[Folded, Folded]:
    """The matrices and biases of a bank of feed-forward parts, with a norm folded in where there is one."""
    into: Any = first_linear(bank)
    up, (out_weight, out_bias) = context.folded.get(into), bank.out.rows()
    if up is None:
        weight, bias = into.rows()
        up = Folded(weight, context.casts[into.weight], bias, None)
    return up, Folded(out_weight, context.casts[bank.out.weight], out_bias, None)
