"""Experts: routers, which may be computed with the norm before them, and products of rows that are sorted by expert."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from braidlm.kernels.context import NO_ADD, PassContext, PendingAdd, Stream, add_pending, combined
from braidlm.kernels.gradient_stacks import GradientSlot, GradientStack, StackedRows
from braidlm.kernels.lowerings.lowering import Lowering, SharedStack, SharedSums, SublayerLowering, lowering_of, lowers
from braidlm.kernels.lowerings.norms import add_norm, form_of
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.ops.fold import Folded
from braidlm.kernels.routed.choices import MAX_FEW
from braidlm.kernels.routed.combine import DeferredDispatch, UncombinedRows
from braidlm.kernels.routed.grouped.layers import FeedConfig, GroupedFeed, GroupedLinear
from braidlm.kernels.routed.grouped.weights import Gathered, GroupedGradientStack
from braidlm.kernels.routed.norm_router import AddNormRoute, NormRouteConfig
from braidlm.kernels.routed.permutation import TILE, Permutation, permute, row_bound
from braidlm.kernels.routed.router import Route, RouterInner
from braidlm.kernels.side_stream import DeferredGradient, current_side_stream, on_side
from braidlm.model.dropout import leave_out
from braidlm.model.paths.routed_join import Routed
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routing

ROUTER = frozenset(
    {"top_k", "base_top_k", "renormalise", "hidden", "activation", "bias", "new", "losses", "balance_rate", "compute"}
)
EXPERTS = frozenset({"experts", "experts.names"} | {f"experts.router.{option}" for option in ROUTER})
"""The options of a part with experts."""


@lowers(TopKRouter)
class RouterLowering(Lowering):
    honours = ROUTER

    def reject(self, part: TopKRouter, body: Any) -> str | None:
        if part.inactive:
            return "some of its choices are inactive"
        if part.opening is not None and part.balance is not None:
            return "new choices are ranked with a balance"
        return "compute is dense" if part.config.compute == "dense" else None


def router_refusal(router: TopKRouter, body: Any) -> str | None:
    """Why kernels do not serve a router."""
    return lowering_of(router).reject(router, body)  # type: ignore[no-any-return]


@lowers(Routed)
class RoutedJoinLowering(Lowering):
    honours = ROUTER

    def reject(self, part: Any, body: Any) -> str | None:
        return router_refusal(part.router, body)


class RoutedLowering(SublayerLowering):
    """A sublayer of experts."""

    routed = True

    def reject(self, part: Any, body: Any) -> str | None:
        return router_refusal(part.router, body)

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        fused = routes_with_norm(part.router, norm)
        return ([] if fused else lowering_of(norm).sums(norm)) + [router_sums(part.router, fused)]


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

    def combine(self, rows: Tensor, slot: GradientSlot | None = None) -> Tensor:
        """Each token's weighted sum of its rows; `slot` is of the layer that computed them."""
        return UncombinedRows(rows, self.weights, self.permutation, slot).combined()


def has_few_choices(router: TopKRouter) -> bool:
    """Whether one kernel may normalise rows and route them: the router has one layer and few choices."""
    return router.inner is None and len(router.choices) <= MAX_FEW


def routes_with_norm(router: TopKRouter, norm: nn.Module) -> bool:
    """Whether the norm before a part is computed together with its router."""
    return has_few_choices(router) and form_of(norm) is not None


def router_sums(router: TopKRouter, fused: bool, kind: Any = None) -> SharedSums:
    """The column sums of a router; beside one of some `kind`, there is no norm to sum for."""
    return SharedSums((kind, fused, router.scores.weight.shape), router)


def add_norm_route(
    stream: Stream,
    pending: PendingAdd | None,
    norm: nn.Module,
    router: TopKRouter,
    reader: nn.Module,
    context: PassContext,
    folded: bool = False,
    deferred: DeferredGradient | None = None,
    permute_on_side: bool = False,
) -> tuple[Tensor, Tensor, Dispatch]:
    """The stream with the pending addition, that normalised for the layer `reader`, and the router's choice.

    The router reads the normalised stream, or, where the norm is `folded` into the reader's weights, the stream itself.
    With `permute_on_side` the caller waits for the dispatch before it reads the permutation.
    """
    if folded and pending is not None:  # so that all layers' sums have one shape
        stream, pending = add_pending(combined(stream), pending), None
    if not routes_with_norm(router, norm):
        stream, normed = add_norm(combined(stream), pending, norm, reader, context, folded)
        dispatch, read = route(router, stream if folded else normed, context, permute_on_side=permute_on_side)
        return (read, normed, dispatch) if folded else (stream, read, dispatch)
    form = form_of(norm)
    assert form is not None
    form = form.without_vectors(folded)
    delta, bias, slot, dropout = NO_ADD if pending is None else pending.fields
    config = NormRouteConfig(
        form.eps, form.centred, context.sums_of(router), reads_normed=not folded, top_k=router.config.top_k,
        renormalise=router.config.renormalise, read_slot=context.slots.get(reader), delta_slot=slot, dropout=dropout,
        deferred=deferred,
    )  # fmt: skip
    if pending is None and isinstance(stream, UncombinedRows):
        config = replace(config, permutation=stream.permutation, rows_slot=stream.slot)
        delta, stream = stream.weights, stream.rows
    summed, normed, *choice = AddNormRoute.apply(
        combined(stream), delta, bias, form.weight, form.bias, *_scores_of(router), router.balance, config
    )
    return summed, normed, _dispatch(router, choice, context, permute_on_side)


def route(
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


def _dispatch(
    router: TopKRouter, choice: list[Tensor], context: PassContext, permute_on_side: bool = False
) -> Dispatch:
    scores, probabilities, chosen, weights = choice
    if router.drop.probability:
        weights = leave_out(weights, router.drop.probability)
    side = current_side_stream() if permute_on_side else None
    with on_side(side, chosen, priority=True):
        permutation = permute(chosen, len(router.choices), context.batch)
    routing = context.routing(router, scores, probabilities, chosen, weights, router.new_rows())
    return Dispatch(routing, weights, permutation, None if side is None else side.last_event())


def grouped_linear(layer: Any, rows: Tensor, dispatch: Dispatch, context: PassContext, gather: bool) -> Tensor:
    """The layer of each row's expert; `rows` are tokens where they are to be gathered."""
    weight, bias = layer.rows()
    return GroupedLinear.apply(
        rows, weight, context.casts[layer.weight], bias, dispatch.permutation, gather,
        context.slots.get(layer),
    )  # fmt: skip


def grouped_feed(
    bank: Any, rows: Tensor, dispatch: Dispatch, context: PassContext, base: tuple[Tensor, DropoutUse] | None = None
) -> Tensor:
    """The feed-forward part of each row's expert; with a `base`, rows that the output is added to after dropout, `rows`
    are sorted rows, and else tokens."""
    (up, out), lowering = feed_matrices(bank, context), lowering_of(bank)
    base_rows, dropout = base or (None, NO_DROPOUT)
    config = FeedConfig(
        dispatch.permutation, lowering.activation(bank), lowering.gated, base is None, dropout,
        lowering.inner_dropout(bank, context), context.slots.get(lowering.first_linear(bank)),
        context.slots.get(bank.out),
    )  # fmt: skip
    return GroupedFeed.apply(rows, up.weight, up.cast, up.bias, out.weight, out.cast, out.bias, base_rows, config)


def feed_matrices(bank: Any, context: PassContext) -> tuple[Folded, Folded]:
    """The matrices and biases of a bank of feed-forward parts, with a norm folded in where there is one."""
    into = lowering_of(bank).first_linear(bank)
    up, (out_weight, out_bias) = context.folded.get(into), bank.out.rows()
    if up is None:
        weight, bias = into.rows()
        up = Folded(weight, context.casts[into.weight], bias, None)
    return up, Folded(out_weight, context.casts[bank.out.weight], out_bias, None)


def grouped_stack(
    linear: Any, top_k: int, tokens: int, dtype: torch.dtype, gathered: Gathered | None = None, summed: bool = False
) -> SharedStack:
    """The slot of the matrices of a bank; `summed`: the kernel that computes the gradient also sums it for the bias."""
    experts, width, outputs = shape = tuple(linear.weight.shape)
    biased, rows = linear.bias is not None and not summed, row_bound(tokens, top_k, experts, TILE)

    def make(banks: int) -> list[GradientStack]:
        inputs = StackedRows(banks, tokens if gathered else rows, width, dtype)
        return [GroupedGradientStack(experts, inputs, StackedRows(banks, rows, outputs, dtype), biased, gathered)]

    return SharedStack((shape, biased, top_k, gathered), (linear,), rows, make, grouped=True)
