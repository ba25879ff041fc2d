"""Routed parts in training on a GPU, by kernels pending for them: projections, blocks and parts of blocks.

Each computes what the module it is named after computes the sparse context. Rows of the batch are kept flat.
"""

from __future__ import annotations  # some of the kernels' types are named below, and may not be there

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.kernels.block import (
    FEEDS,
    NO_ADD,
    PassContext,
    PendingAdd,
    add_norm,
    add_pending,
    feed_forward,
    into_feed,
    serves_feed,
    serves_norm,
)
from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.side_stream import DeferredGradient, current_side_stream, on_side
from braidlm.model.attention.routed import RoutedAttention
from braidlm.model.attention.softmax import SoftmaxAttention
from braidlm.model.feed.feeds import MLP, SwiGLU
from braidlm.model.feed.routed import RoutedFeed
from braidlm.model.norms import LayerNorm
from braidlm.model.paths.expert_projection import ExpertProjection
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.paths.routed_join import Routed
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routing

with contextlib.suppress(ImportError):  # without Triton the plain operations serve every device
    from braidlm.kernels.ops.fold import Folded, WideLinear
    from braidlm.kernels.ops.norm_router import MOST_CHOICES, AddNormRoute, CombineNormRoute, NormRouteConfig
    from braidlm.kernels.ops.router import Route
    from braidlm.kernels.routed.attention import AttendRouted
    from braidlm.kernels.routed.combine import Combine
    from braidlm.kernels.routed.gradient_stacks import GroupedGradientSlot
    from braidlm.kernels.routed.grouped_layers import GroupedFeed, GroupedLinear
    from braidlm.kernels.routed.permutation import Permutation, permute
    from braidlm.kernels.routed.project_rows import WIDEST, ProjectAddNormRows
    from braidlm.kernels.routed.rows import AddNormRows, Norm


@dataclass
class Chosen:
    """A routing, and where its rows stand."""

    routing: Routing
    weights: Tensor
    permutation: Permutation
    placed: torch.cuda.Event | None = None
    """What to wait for before the permutation is read."""


@dataclass
class UncombinedRows:
    """A stream as rows that are yet to be mixed; `slot` is of the layer that made them."""

    rows: Tensor
    weights: Tensor
    permutation: Permutation
    slot: GroupedGradientSlot | None = None

    def mixed(self) -> Tensor:
        """Each token's weighted sum of its rows."""
        return Combine.apply(self.rows, self.weights, self.permutation, self.slot)


@dataclass
class Base:
    """Rows that something is added to, after some of it was dropped by chance."""

    rows: Tensor
    dropout: float
    seed: Tensor | None


def serves_router(router: TopKRouter) -> bool:
    config = router.config
    return router.norm is None and not config.noise and not router.inactive and config.compute != "dense"


def serves_attention_bank(bank: Any) -> bool:
    if type(bank) is not SoftmaxAttention or bank.out is None or bank.kv_heads != bank.heads:
        return False
    return bank.head_dim >= 16 and bank.head_dim & (bank.head_dim - 1) == 0


def serves_feed_bank(bank: Any) -> bool:
    return type(bank) in FEEDS and getattr(bank, "beta", None) is None


def serves_routed_feed(part: nn.Module) -> bool:
    if type(part) is not RoutedFeed or not serves_router(part.router) or not serves_feed_bank(part.bank):
        return False
    return part.shared is None or serves_feed(part.shared)


def serves_routed_attention(part: nn.Module) -> bool:
    if type(part) is not RoutedAttention or part.scope != "all":
        return False
    return serves_router(part.router) and serves_attention_bank(part.bank)


def serves_layer(layer: nn.Module) -> bool:
    """A layer of routed blocks, of one shape, at the stream's own width."""
    if type(layer) is not ParallelLayer or type(layer.join) is not Routed or layer.stack is None:
        return False
    join = layer.join
    plain = layer.enter is None and not len(join.leave) and join.out is None and not join.residual
    if not plain or join.scope != "all" or len(layer.stack) != 1 or not serves_router(join.router):
        return False
    block: Any = layer.stack[0]
    if not (serves_norm(block.attention_norm) and type(block.attention_norm) is type(block.feed_norm)):
        return False
    return serves_attention_bank(block.attention) and serves_feed_bank(block.feed)


def serves_projection(part: nn.Module) -> bool:
    return type(part) is ExpertProjection and serves_router(part.router)


def routes_with_norm(part: nn.Module) -> bool:
    """Whether the norm before a part is computed together with its router."""
    return isinstance(part, (RoutedAttention, RoutedFeed)) and len(part.router.choices) <= MOST_CHOICES


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
) -> tuple[Tensor, Tensor, Chosen]:
    """The stream with what was pending, the same normalised for `reader`, and what the router makes of either.

    Rows may be placed beside what the caller does next: it waits for `placed` before it reads the permutation.
    """
    if isinstance(stream, UncombinedRows) and (pending is not None or len(router.choices) > MOST_CHOICES):
        stream = stream.mixed()
    if folded and pending is not None and isinstance(stream, Tensor):  # so that all layers' sums are alike
        stream, pending = add_pending(stream, pending, context), None
    if isinstance(stream, Tensor) and len(router.choices) > MOST_CHOICES:
        stream, normed = add_norm(stream, pending, norm, reader, context, folded)
        if reads_normed:
            chosen, normed = route(router, normed, context)
        else:
            chosen, stream = route(router, stream, context)
        return stream, normed, chosen
    centred = isinstance(norm, LayerNorm)
    delta, bias, slot, dropout, seed = NO_ADD if pending is None else pending.parts
    vectors = (None, None) if folded else (norm.weight, norm.bias if centred else None)
    scores = router.scores
    config = NormRouteConfig(
        norm.eps, centred, reads_normed, router.config.top_k, router.config.renormalise, context.sums_of(router),
        context.slots.get(reader) or context.grouped.get(reader), slot, dropout, seed, deferred,
    )  # fmt: skip
    parts = (*vectors, scores.weight, scores.bias, router.balance, config)
    if isinstance(stream, UncombinedRows):
        made = CombineNormRoute.apply(stream.rows, stream.weights, stream.permutation, stream.slot, *parts)
    else:
        made = AddNormRoute.apply(stream, delta, bias, *parts)
    summed, normed, *choice = made
    return summed, normed, _chosen(router, choice, context, permute_on_side)


def route(
    router: TopKRouter, rows: Tensor, context: PassContext, slot: GradientSlot | None = None
) -> tuple[Chosen, Tensor]:
    """The router's choice for every row, where its experts' rows stand, and the rows for whoever reads them next.

    `slot` is of the layer whose output's gradient is that of the rows.
    """
    config = router.config
    made = Route.apply(
        rows, router.scores.weight, router.scores.bias, router.balance, config.top_k, config.renormalise,
        context.sums_of(router), slot,
    )  # fmt: skip
    rows, *choice = made
    return _chosen(router, choice, context), rows


def _chosen(router: TopKRouter, made: list[Tensor], context: PassContext, permute_on_side: bool = False) -> Chosen:
    scores, probabilities, chosen, weights = made
    config, side = router.config, current_side_stream() if permute_on_side else None
    with on_side(side, chosen, priority=True):
        permutation = permute(chosen, len(router.choices), context.batch)
    placed = None if side is None else side.last_event()
    shape = (context.batch, context.time, -1)
    routing = Routing(
        router.address, router.choices, probabilities.view(shape), chosen.view(shape), weights.view(shape),
        dict(config.losses), scores.view(shape),
    )  # fmt: skip
    return Chosen(routing, weights, permutation, placed)


def layer_of_blocks(
    stream: Tensor | UncombinedRows, pending: PendingAdd | None, layer: Any, context: PassContext
) -> tuple[UncombinedRows, Routing]:
    """What `ParallelLayer` makes of the stream by its routed blocks."""
    block, router = layer.stack[0], layer.join.router
    deferred = DeferredGradient() if len(router.choices) <= MOST_CHOICES else None  # with more, nobody asks for it
    stream, normed, chosen = add_norm_route(
        stream, pending, block.attention_norm, router, block.attention.qkv, context, False, folded=True, deferred=deferred,
        permute_on_side=True,
    )  # fmt: skip
    bank, permutation, probability = block.attention, chosen.permutation, block.drop.probability
    attended_rows = attended(bank, normed, chosen, context)
    norm = Norm(
        block.feed_norm.eps, isinstance(block.feed_norm, LayerNorm), probability, context.seed(block, probability),
        context.grouped.get(into_feed(block.feed)), context.grouped.get(bank.out), deferred,
    )  # fmt: skip
    if stream.shape[1] <= WIDEST:
        rows, normed = ProjectAddNormRows.apply(
            attended_rows, bank.out.weight, context.narrow[bank.out.weight], bank.out.bias, stream, permutation, norm
        )
    else:
        delta = grouped_linear(bank.out, attended_rows, chosen, context, gather=False)
        rows, normed = AddNormRows.apply(stream, delta, permutation, norm)
    made = fed(block.feed, normed, chosen, context, Base(rows, probability, context.seed(block, probability, 1)))
    slot = None if probability else context.grouped.get(block.feed.out)
    return UncombinedRows(made, chosen.weights, chosen.permutation, slot), chosen.routing


def routed_attention(
    stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
) -> tuple[Tensor, PendingAdd, Routing]:
    """The stream with what was pending, and what `RoutedAttention` makes of it normalised."""
    stream, normed, chosen = add_norm_route(
        stream, pending, norm, part.router, part.bank.qkv, context, True, permute_on_side=True
    )
    rows = grouped_linear(part.bank.out, attended(part.bank, normed, chosen, context), chosen, context, gather=False)
    return stream, PendingAdd(mixed(rows, chosen, context.grouped.get(part.bank.out))), chosen.routing


def routed_feed(
    stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
) -> tuple[Tensor, PendingAdd, Routing]:
    """The stream with what was pending, and what `RoutedFeed` makes of it normalised."""
    reader = into_feed(part.bank if part.shared is None else part.shared)
    stream, normed, chosen = add_norm_route(stream, pending, norm, part.router, reader, context, True)
    made = mixed(fed(part.bank, normed, chosen, context), chosen, context.grouped.get(part.bank.out))
    if part.shared is None:
        return stream, PendingAdd(made), chosen.routing
    beside = feed_forward(part.shared, normed, context)
    return stream, PendingAdd(beside.delta + made, beside.bias), chosen.routing


def projected(part: Any, stream: Tensor, pending: PendingAdd | None, context: PassContext) -> tuple[Tensor, Routing]:
    """What `ExpertProjection` makes of the stream with what was pending."""
    slot = None if pending is None or pending.dropout else pending.slot  # with dropout the gradients differ
    chosen, stream = route(part.router, add_pending(stream, pending, context), context, slot)
    if part.gate_up is None:
        rows = grouped_linear(part.out, stream, chosen, context, gather=True)
    else:
        rows = grouped_feed(part.gate_up, part.out, "silu", True, stream, chosen, context)
    return mixed(rows, chosen), chosen.routing


def mixed(rows: Tensor, chosen: Chosen, slot: GroupedGradientSlot | None = None) -> Tensor:
    """Each token's weighted sum of its rows; `slot` is of the layer that made them."""
    return UncombinedRows(rows, chosen.weights, chosen.permutation, slot).mixed()


def attended(bank: Any, normed: Tensor, chosen: Chosen, context: PassContext) -> Tensor:
    """What the rows mix of all tokens' values."""
    folded, permutation = context.folded[bank.qkv], chosen.permutation
    at = context.slots.get(bank.qkv)
    qkv = WideLinear.apply(normed, folded.weight, folded.copy, folded.bias_copy, at)
    side = current_side_stream()
    if chosen.placed is not None and side is not None:
        side.wait_event(chosen.placed)
    probability, scale = bank.drop.probability, 1 / math.sqrt(bank.head_dim)
    mixed_values: Tensor = AttendRouted.apply(
        qkv.view(len(normed), bank.stack, 3, bank.heads, bank.head_dim), permutation.source, permutation.begins,
        permutation.routed, scale, probability, context.seed(bank, probability), bank.window, None, folded.bias,
        context.sums_of(bank.qkv), at, context.grouped.get(bank.out),
    )  # fmt: skip
    return mixed_values


def fed(bank: Any, rows: Tensor, chosen: Chosen, context: PassContext, base: Base | None = None) -> Tensor:
    """The rows through the feed-forward parts of their experts, added to a base if there is one."""
    kind = bank.kind if isinstance(bank, MLP) else "silu" if isinstance(bank, SwiGLU) else "gelu"
    gated = not isinstance(bank, MLP)
    return grouped_feed(into_feed(bank), bank.out, kind, gated, rows, chosen, context, base)


def grouped_linear(layer: Any, rows: Tensor, chosen: Chosen, context: PassContext, gather: bool) -> Tensor:
    copy = context.narrow[layer.weight]
    return GroupedLinear.apply(
        rows, layer.weight, copy, layer.bias, chosen.permutation, gather, context.grouped.get(layer)
    )


def grouped_feed(
    into: Any,
    out: Any,
    kind: str,
    gated: bool,
    rows: Tensor,
    chosen: Chosen,
    context: PassContext,
    base: Base | None = None,
) -> Tensor:
    """A feed-forward part of each row's expert; `rows` are sorted rows where there is a base, and else tokens."""
    up = context.folded.get(into) or Folded(into.weight, context.narrow[into.weight], into.bias, None)
    base_rows, dropout, seed = (None, 0.0, None) if base is None else (base.rows, base.dropout, base.seed)
    return GroupedFeed.apply(
        rows, up.weight, up.copy, up.bias, out.weight, context.narrow[out.weight], out.bias, base_rows, chosen.permutation,
        kind, gated, base is None, dropout, seed, context.grouped.get(into), context.grouped.get(out),
    )  # fmt: skip
