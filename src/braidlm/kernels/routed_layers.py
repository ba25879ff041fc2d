"""Routed parts by kernels: projections with experts, layers of routed blocks, attention and feed-forward experts.

Each function computes what the sparse forward of the module it is named after computes. Rows of the batch are flat.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from braidlm.kernels.context import NO_ADD, PassContext, PendingAdd, add_norm, add_pending
from braidlm.kernels.dense_layers import Sublayer, activation_of, feed_forward, first_linear, inner_dropout
from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.ops.fold import Folded
from braidlm.kernels.ops.linear import Linear
from braidlm.kernels.routed.attention import AttendRouted
from braidlm.kernels.routed.choices import MAX_FEW
from braidlm.kernels.routed.combine import Combine, DeferredDispatch
from braidlm.kernels.routed.combine_norm import UncombinedSum
from braidlm.kernels.routed.combined_feed import CombinedFeed
from braidlm.kernels.routed.grouped.layers import GroupedFeed, GroupedLinear
from braidlm.kernels.routed.norm_router import AddNormRoute, CombineNormRoute, NormRouteConfig
from braidlm.kernels.routed.permutation import Permutation, permute
from braidlm.kernels.routed.project_rows import MAX_WIDTH, ProjectAddNormRows
from braidlm.kernels.routed.router import Route
from braidlm.kernels.routed.router_inner import RouterInner
from braidlm.kernels.routed.rows import AddNormRows, Norm
from braidlm.kernels.side_stream import DeferredGradient, current_side_stream, on_side
from braidlm.model.dropout import leave_out
from braidlm.model.norms import LayerNorm
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routing, Routings


@dataclass
class Dispatch:
    """A routing, and the permutation that sorts its rows by expert."""

    routing: Routing
    weights: Tensor
    permutation: Permutation
    ready: torch.cuda.Event | None = None
    """The event to wait for before the permutation is read, where the side stream computes it."""
    deferred: DeferredDispatch | None = None
    """For experts that read the rows which the router passed on, where its backward pass takes gradients from here."""

    def wait(self) -> None:
        """Wait for the permutation."""
        side = current_side_stream()
        if self.ready is not None and side is not None:
            side.wait_event(self.ready)


@dataclass
class UncombinedRows:
    """A stream as sorted rows that are not combined yet; `slot` is of the layer that computed them."""

    rows: Tensor
    weights: Tensor
    permutation: Permutation
    slot: GradientSlot | None = None

    def combined(self) -> Tensor:
        """Each token's weighted sum of its rows."""
        return Combine.apply(self.rows, self.weights, self.permutation, self.slot)


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
    dispatch, stream = _route(experts.router, add_pending(stream, pending), context, slot)
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
    return stream, PendingAdd(combine_rows(rows, dispatch, context.slots.get(bank.out))), (dispatch.routing,)


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
    (up, out), (kind, gated) = _feed_matrices(part.bank, context), activation_of(part.bank)
    # Where gradients have slots no layer is computed again, which would need the sum without the next norm.
    uncombined = None if out_slot is None else UncombinedSum()
    delta = CombinedFeed.apply(
        normed, up.weight, up.cast, up.bias, out.weight, out.cast, out.bias, dispatch.weights,
        None if shared is None else shared.delta, dispatch.permutation, kind, gated, inner_dropout(part.bank, context),
        context.slots.get(reader), out_slot, dispatch.deferred, uncombined,
    )  # fmt: skip
    bias = None if shared is None else shared.bias
    return stream, PendingAdd(delta, bias, out_slot, uncombined=uncombined), (dispatch.routing,)


def add_norm_route(
    stream: Tensor | UncombinedRows,
    pending: PendingAdd | None,
    norm: Any,
    router: TopKRouter,
    reader: nn.Module,
    context: PassContext,
    reads_normed: bool,
    folded: bool = False,
    deferred: DeferredGradient | None = None,
    permute_on_side: bool = False,
) -> tuple[Tensor, Tensor, Dispatch]:
    """The stream with the pending addition, the same normalised for the layer `reader`, and the router's choice.

    The router reads the normalised stream or the stream itself. With `permute_on_side` the caller waits for the
    dispatch before it reads the permutation.
    """
    if isinstance(stream, UncombinedRows) and (pending is not None or not routes_with_norm(router)):
        stream = stream.combined()
    if folded and pending is not None and isinstance(stream, Tensor):  # so that all layers' sums have one shape
        stream, pending = add_pending(stream, pending), None
    if isinstance(stream, Tensor) and not routes_with_norm(router):
        stream, normed = add_norm(stream, pending, norm, reader, context, folded)
        if reads_normed:
            dispatch, normed = _route(router, normed, context, permute_on_side=permute_on_side)
        else:
            dispatch, stream = _route(router, stream, context, permute_on_side=permute_on_side)
        return stream, normed, dispatch
    centred = isinstance(norm, LayerNorm)
    delta, bias, slot, dropout, seed = NO_ADD if pending is None else pending.fields
    vectors = (None, None) if folded else (norm.weight, norm.bias if centred else None)
    config = NormRouteConfig(
        norm.eps, centred, reads_normed, router.config.top_k, router.config.renormalise, context.sums_of(router),
        context.slots.get(reader), slot, dropout, seed, deferred,
    )  # fmt: skip
    rest = (*vectors, *_scores_of(router), router.balance, config)
    if isinstance(stream, UncombinedRows):
        outputs = CombineNormRoute.apply(stream.rows, stream.weights, stream.permutation, stream.slot, *rest)
    else:
        outputs = AddNormRoute.apply(stream, delta, bias, *rest)
    summed, normed, *choice = outputs
    return summed, normed, _dispatch(router, choice, context, permute_on_side)


def _route(
    router: TopKRouter,
    rows: Tensor,
    context: PassContext,
    slot: GradientSlot | None = None,
    permute_on_side: bool = False,
) -> tuple[Dispatch, Tensor]:
    """The router's choice for every row, and the rows for their next reader.

    `slot` is of the layer whose output's gradient is that of the rows; for `permute_on_side` see `add_norm_route`.
    """
    config = router.config
    inner, read = router.inner, rows
    # Not where others read the rows beside the router, nor where weights change after it.
    deferred = DeferredDispatch() if inner is None and not router.drop.probability else None
    if inner is not None:
        read = RouterInner.apply(rows, inner.weight, inner.bias, config.activation)
    passed_on, *choice = Route.apply(
        read, *_scores_of(router), router.balance, config.top_k, config.renormalise,
        context.sums_of(router), slot if inner is None else None, deferred, context.slots.get(router.scores),
    )  # fmt: skip
    dispatch = _dispatch(router, choice, context, permute_on_side)
    dispatch.deferred = deferred
    return dispatch, passed_on if inner is None else rows


def _scores_of(router: TopKRouter) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a router's scores; what closes new choices is a part of the bias."""
    weight, bias = router.scores.rows()
    if router.opening is None:
        return weight, bias
    opening = F.pad(router.opening, (router.old, 0), value=1.0).log()
    return weight, opening if bias is None else bias + opening


def routes_with_norm(router: TopKRouter) -> bool:
    """Whether the norm before a part is computed together with its router: one of one layer and few choices."""
    return router.inner is None and len(router.choices) <= MAX_FEW


def _dispatch(
    router: TopKRouter, choice: list[Tensor], context: PassContext, permute_on_side: bool = False
) -> Dispatch:
    scores, probabilities, chosen, weights = choice
    if router.drop.probability:
        weights = leave_out(weights, router.drop.probability)
    side = current_side_stream() if permute_on_side else None
    with on_side(side, chosen, priority=True):
        permutation = permute(chosen, len(router.choices), context.batch)
    routing = Routing(
        router.address,
        router.choices,
        context.unflattened(probabilities),
        context.unflattened(chosen),
        context.unflattened(weights),
        dict(router.config.losses),
        context.unflattened(scores),
        router.new_rows(),
    )
    return Dispatch(routing, weights, permutation, None if side is None else side.last_event())


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


def combine_rows(rows: Tensor, dispatch: Dispatch, slot: GradientSlot | None = None) -> Tensor:
    """Each token's weighted sum of its rows; `slot` is of the layer that computed them."""
    return UncombinedRows(rows, dispatch.weights, dispatch.permutation, slot).combined()


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
