"""Routers: what is pending is added to the stream, the sum is normalised and routed, and rows are sorted by choice.

Rows of the batch are flat.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from braidlm.kernels.context import NO_ADD, PassContext, PendingAdd, add_pending
from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.lowerings.lowering import Lowering, SharedSums, first, lowering_of, lowers, unless
from braidlm.kernels.lowerings.norms import add_norm, form_of
from braidlm.kernels.routed.choices import MAX_FEW
from braidlm.kernels.routed.combine import DeferredDispatch, UncombinedRows
from braidlm.kernels.routed.norm_router import AddNormRoute, CombineNormRoute, NormRouteConfig
from braidlm.kernels.routed.permutation import Permutation, permute
from braidlm.kernels.routed.router import Route, RouterInner
from braidlm.kernels.side_stream import DeferredGradient, current_side_stream, on_side
from braidlm.model.dropout import leave_out
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routing

ROUTER = frozenset({"top_k", "renormalise", "hidden", "activation", "bias", "new", "losses", "balance_rate", "compute"})
EXPERTS = frozenset({"experts", "experts.names"} | {f"experts.router.{option}" for option in ROUTER})
"""The options of a part with experts."""


@lowers(TopKRouter)
class RouterLowering(Lowering):
    honours = ROUTER

    def reject(self, part: TopKRouter, body: Any) -> str | None:
        return first(
            unless(not part.inactive, "some of its choices are inactive"),
            unless(part.opening is None or part.balance is None, "new choices are ranked with a balance"),
            unless(part.config.compute != "dense", "compute is dense"),
        )


def router_refusal(router: TopKRouter, body: Any) -> str | None:
    """Why kernels do not serve a router."""
    return lowering_of(router).reject(router, body)  # type: ignore[no-any-return]


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


def routed_sums(router: TopKRouter, norm: nn.Module) -> list[SharedSums]:
    """The column sums of a router in a block, and of the norm that it reads."""
    fused = routes_with_norm(router, norm)
    return ([] if fused else lowering_of(norm).sums(norm)) + [router_sums(router, fused)]


def router_sums(router: TopKRouter, fused: bool, kind: Any = None) -> SharedSums:
    """The column sums of a router; beside one of some `kind`, there is no norm to sum for."""
    return SharedSums((kind, fused, router.scores.weight.shape), router)


def add_norm_route(
    stream: Tensor | UncombinedRows,
    pending: PendingAdd | None,
    norm: nn.Module,
    router: TopKRouter,
    reader: nn.Module,
    context: PassContext,
    reads_normed: bool,
    folded: bool = False,
    deferred: DeferredGradient | None = None,
    permute_on_side: bool = False,
) -> tuple[Tensor, Tensor, Dispatch]:
    """The stream with the pending addition, that normalised for the layer `reader`, and the router's choice.

    The router reads the normalised stream or the stream itself. With `permute_on_side` the caller waits for the
    dispatch before it reads the permutation.
    """
    fused = routes_with_norm(router, norm)
    if isinstance(stream, UncombinedRows) and (pending is not None or not fused):
        stream = stream.combined()
    if folded and pending is not None and isinstance(stream, Tensor):  # so that all layers' sums have one shape
        stream, pending = add_pending(stream, pending), None
    if isinstance(stream, Tensor) and not fused:
        stream, normed = add_norm(stream, pending, norm, reader, context, folded)
        if reads_normed:
            dispatch, normed = route(router, normed, context, permute_on_side=permute_on_side)
        else:
            dispatch, stream = route(router, stream, context, permute_on_side=permute_on_side)
        return stream, normed, dispatch
    form = form_of(norm)
    assert form is not None
    form = form.without_vectors() if folded else form
    delta, bias, slot, dropout, seed = NO_ADD if pending is None else pending.fields
    config = NormRouteConfig(
        form.eps, form.centred, reads_normed, router.config.top_k, router.config.renormalise, context.sums_of(router),
        context.slots.get(reader), slot, dropout, seed, deferred,
    )  # fmt: skip
    rest = (form.weight, form.bias, *_scores_of(router), router.balance, config)
    if isinstance(stream, UncombinedRows):
        outputs = CombineNormRoute.apply(stream.rows, stream.weights, stream.permutation, stream.slot, *rest)
    else:
        outputs = AddNormRoute.apply(stream, delta, bias, *rest)
    summed, normed, *choice = outputs
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
