"""Routed parts in training on a GPU, by kernels written for them: projections, blocks and parts of blocks.

Each computes what the module it is named after computes the sparse way. Rows of the batch are kept flat.
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
    NOTHING,
    Pass,
    Written,
    add_norm,
    feed_forward,
    into_feed,
    serves_feed,
    serves_norm,
    settled,
)
from braidlm.kernels.side_stream import Owed, beside
from braidlm.kernels.weight_stacks import Place
from braidlm.model.attention.softmax import SoftmaxAttention
from braidlm.model.feed.feeds import MLP, SwiGLU
from braidlm.model.norms import LayerNorm
from braidlm.model.paths.expert_projection import ExpertProjection
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.paths.routed_join import Routed
from braidlm.model.routing.routed_parts import RoutedAttention, RoutedFeed
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routing

with contextlib.suppress(ImportError):  # without Triton the plain operations serve every device
    from braidlm.kernels.ops.fold import Folded, WideLinear
    from braidlm.kernels.ops.norm_router import MOST_CHOICES, AddNormRoute, How, MixNormRoute
    from braidlm.kernels.ops.router import Route
    from braidlm.kernels.routed.attention import AttendRouted
    from braidlm.kernels.routed.grouped_layers import GroupedFeed, GroupedLinear
    from braidlm.kernels.routed.grouped_stacks import GroupedPlace
    from braidlm.kernels.routed.mix import Mix
    from braidlm.kernels.routed.placement import Placement, place
    from braidlm.kernels.routed.project_rows import WIDEST, ProjectAddNormRows
    from braidlm.kernels.routed.rows import AddNormRows, Norm


@dataclass
class Chosen:
    """A routing, and where its rows stand."""

    routing: Routing
    weights: Tensor
    placement: Placement
    placed: torch.cuda.Event | None = None
    """What to wait for before the placement is read."""


@dataclass
class Unmixed:
    """A stream as rows that are yet to be mixed; `place` is of the layer that made them."""

    rows: Tensor
    weights: Tensor
    placement: Placement
    place: GroupedPlace | None = None

    def mixed(self) -> Tensor:
        """Each token's weighted sum of its rows."""
        return Mix.apply(self.rows, self.weights, self.placement, self.place)


@dataclass
class Base:
    """Rows that something is added to, after some of it was dropped by chance."""

    rows: Tensor
    dropout: float
    seed: Tensor | None


def serves_router(router: TopKRouter) -> bool:
    config = router.config
    return router.norm is None and not config.noise and not router.silent and config.compute != "dense"


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
    stream: Tensor | Unmixed,
    written: Written | None,
    norm: Any,
    router: TopKRouter,
    reader: nn.Module,
    way: Pass,
    reads_normed: bool,
    folded: bool = False,
    owed: Owed | None = None,
    place_aside: bool = False,
) -> tuple[Tensor, Tensor, Chosen]:
    """The stream with what was written, the same normalised for `reader`, and what the router makes of either.

    Rows may be placed beside what the caller does next: it waits for `placed` before it reads the placement.
    """
    if isinstance(stream, Unmixed) and (written is not None or len(router.choices) > MOST_CHOICES):
        stream = stream.mixed()
    if folded and written is not None and isinstance(stream, Tensor):  # so that all layers' sums are alike
        stream, written = settled(stream, written, way), None
    if isinstance(stream, Tensor) and len(router.choices) > MOST_CHOICES:
        stream, normed = add_norm(stream, written, norm, reader, way, folded)
        if reads_normed:
            chosen, normed = route(router, normed, way)
        else:
            chosen, stream = route(router, stream, way)
        return stream, normed, chosen
    centred = isinstance(norm, LayerNorm)
    delta, bias, place, dropout, seed = NOTHING if written is None else written.parts
    vectors = (None, None) if folded else (norm.weight, norm.bias if centred else None)
    scores, config = router.scores, router.config
    how = How(
        norm.eps, centred, reads_normed, config.top_k, config.renormalise, way.sums_of(router),
        way.places.get(reader) or way.grouped.get(reader), place, dropout, seed, owed,
    )  # fmt: skip
    parts = (*vectors, scores.weight, scores.bias, router.balance, how)
    if isinstance(stream, Unmixed):
        made = MixNormRoute.apply(stream.rows, stream.weights, stream.placement, stream.place, *parts)
    else:
        made = AddNormRoute.apply(stream, delta, bias, *parts)
    summed, normed, *choice = made
    return summed, normed, _chosen(router, choice, way, place_aside)


def route(router: TopKRouter, rows: Tensor, way: Pass, place: Place | None = None) -> tuple[Chosen, Tensor]:
    """The router's choice for every row, where its experts' rows stand, and the rows for whoever reads them next.

    `place` is of the layer whose output's gradient is that of the rows.
    """
    config = router.config
    made = Route.apply(
        rows, router.scores.weight, router.scores.bias, router.balance, config.top_k, config.renormalise,
        way.sums_of(router), place,
    )  # fmt: skip
    rows, *choice = made
    return _chosen(router, choice, way), rows


def _chosen(router: TopKRouter, made: list[Tensor], way: Pass, place_aside: bool = False) -> Chosen:
    scores, probabilities, chosen, weights = made
    config, aside = router.config, way.aside if place_aside else None
    with beside(aside, chosen, urgent=True):
        placement = place(chosen, len(router.choices), way.batch)
    placed = None if aside is None else aside.last()
    shape = (way.batch, way.time, -1)
    routing = Routing(
        router.address, router.choices, probabilities.view(shape), chosen.view(shape), weights.view(shape),
        dict(config.losses), scores.view(shape),
    )  # fmt: skip
    return Chosen(routing, weights, placement, placed)


def layer_of_blocks(
    stream: Tensor | Unmixed, written: Written | None, layer: Any, way: Pass
) -> tuple[Unmixed, Routing]:
    """What `ParallelLayer` makes of the stream by its routed blocks."""
    block, router = layer.stack[0], layer.join.router
    owed = Owed() if len(router.choices) <= MOST_CHOICES else None  # with more, nobody asks for it
    stream, normed, chosen = add_norm_route(
        stream, written, block.attention_norm, router, block.attention.qkv, way, False, folded=True, owed=owed,
        place_aside=True,
    )  # fmt: skip
    bank, placement, probability = block.attention, chosen.placement, block.drop.probability
    attended_rows = attended(bank, normed, chosen, way)
    norm = Norm(
        block.feed_norm.eps, isinstance(block.feed_norm, LayerNorm), probability, way.seed(block, probability),
        way.grouped.get(into_feed(block.feed)), way.grouped.get(bank.out), owed, way.aside,
    )  # fmt: skip
    if stream.shape[1] <= WIDEST:
        rows, normed = ProjectAddNormRows.apply(
            attended_rows, bank.out.weight, way.narrow[bank.out.weight], bank.out.bias, stream, placement, norm
        )
    else:
        delta = grouped_linear(bank.out, attended_rows, chosen, way, gather=False)
        rows, normed = AddNormRows.apply(stream, delta, placement, norm)
    made = fed(block.feed, normed, chosen, way, Base(rows, probability, way.seed(block, probability, 1)))
    place = None if probability else way.grouped.get(block.feed.out)
    return Unmixed(made, chosen.weights, chosen.placement, place), chosen.routing


def routed_attention(
    stream: Tensor, written: Written | None, norm: Any, part: Any, way: Pass
) -> tuple[Tensor, Written, Routing]:
    """The stream with what was written, and what `RoutedAttention` makes of it normalised."""
    stream, normed, chosen = add_norm_route(
        stream, written, norm, part.router, part.bank.qkv, way, True, place_aside=True
    )
    rows = grouped_linear(part.bank.out, attended(part.bank, normed, chosen, way), chosen, way, gather=False)
    return stream, Written(mixed(rows, chosen, way.grouped.get(part.bank.out))), chosen.routing


def routed_feed(
    stream: Tensor, written: Written | None, norm: Any, part: Any, way: Pass
) -> tuple[Tensor, Written, Routing]:
    """The stream with what was written, and what `RoutedFeed` makes of it normalised."""
    reader = into_feed(part.bank if part.shared is None else part.shared)
    stream, normed, chosen = add_norm_route(stream, written, norm, part.router, reader, way, True)
    made = mixed(fed(part.bank, normed, chosen, way), chosen, way.grouped.get(part.bank.out))
    if part.shared is None:
        return stream, Written(made), chosen.routing
    beside = feed_forward(part.shared, normed, way)
    return stream, Written(beside.delta + made, beside.bias), chosen.routing


def projected(part: Any, stream: Tensor, written: Written | None, way: Pass) -> tuple[Tensor, Routing]:
    """What `ExpertProjection` makes of the stream with what was written."""
    place = None if written is None or written.dropout else written.place  # with dropout the gradients differ
    chosen, stream = route(part.router, settled(stream, written, way), way, place)
    if part.gate_up is None:
        rows = grouped_linear(part.out, stream, chosen, way, gather=True)
    else:
        rows = grouped_feed(part.gate_up, part.out, "silu", True, stream, chosen, way)
    return mixed(rows, chosen), chosen.routing


def mixed(rows: Tensor, chosen: Chosen, place: GroupedPlace | None = None) -> Tensor:
    """Each token's weighted sum of its rows; `place` is of the layer that made them."""
    return Unmixed(rows, chosen.weights, chosen.placement, place).mixed()


def attended(bank: Any, normed: Tensor, chosen: Chosen, way: Pass) -> Tensor:
    """What the rows mix of all tokens' values."""
    side, placement = way.folded[bank.qkv], chosen.placement
    at = way.places.get(bank.qkv)
    qkv = WideLinear.apply(normed, side.weight, side.copy, side.bias_copy, way.aside, at)
    if chosen.placed is not None and way.aside is not None:
        way.aside.wait(chosen.placed)
    probability, scale = bank.drop.probability, 1 / math.sqrt(bank.head_dim)
    mixed_values: Tensor = AttendRouted.apply(
        qkv.view(len(normed), bank.stack, 3, bank.heads, bank.head_dim), placement.source, placement.begins,
        placement.routed, scale, probability, way.seed(bank, probability), bank.window, None, side.bias,
        way.sums_of(bank.qkv), at, way.grouped.get(bank.out),
    )  # fmt: skip
    return mixed_values


def fed(bank: Any, rows: Tensor, chosen: Chosen, way: Pass, base: Base | None = None) -> Tensor:
    """The rows through the feed-forward parts of their experts, added to a base if there is one."""
    kind = bank.kind if isinstance(bank, MLP) else "silu" if isinstance(bank, SwiGLU) else "gelu"
    gated = not isinstance(bank, MLP)
    return grouped_feed(into_feed(bank), bank.out, kind, gated, rows, chosen, way, base)


def grouped_linear(layer: Any, rows: Tensor, chosen: Chosen, way: Pass, gather: bool) -> Tensor:
    copy = way.narrow[layer.weight]
    return GroupedLinear.apply(
        rows, layer.weight, copy, layer.bias, chosen.placement, gather, way.aside, way.grouped.get(layer)
    )


def grouped_feed(
    into: Any,
    out: Any,
    kind: str,
    gated: bool,
    rows: Tensor,
    chosen: Chosen,
    way: Pass,
    base: Base | None = None,
) -> Tensor:
    """A feed-forward part of each row's expert; `rows` are sorted rows where there is a base, and else tokens."""
    up = way.folded.get(into) or Folded(into.weight, way.narrow[into.weight], into.bias, None)
    base_rows, dropout, seed = (None, 0.0, None) if base is None else (base.rows, base.dropout, base.seed)
    return GroupedFeed.apply(
        rows, up.weight, up.copy, up.bias, out.weight, way.narrow[out.weight], out.bias, base_rows, chosen.placement,
        kind, gated, base is None, way.aside, dropout, seed, way.grouped.get(into), way.grouped.get(out),
    )  # fmt: skip
