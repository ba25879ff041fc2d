"""The routed join: the top k of the paths' blocks for each token, chosen before they are computed (MoEP)."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..attention.attention import AttentionExpertsConfig, Scope
from ..attention.experts import set_active_attention_share, span_for_scope
from ..config.registry import Choice
from ..errors import BraidError
from ..feed.feeds import FeedExpertsConfig
from ..routing.dispatch import Permutation, is_sparse, sort_by_expert
from ..routing.router import RouterConfig, TopKRouter, set_active_share
from ..routing.routing import Routing, Routings
from ..span import Span
from ..stages import BlockConfig
from .joins import JoinConfig, JoinShape, SameWidthJoin, joins
from .parallel import ParallelLayer, ParallelStage, of_one_shape


@joins.register("routed")
class Routed(SameWidthJoin):
    """A router reads the stream and chooses a few paths for each token; the output is their weighted sum (MoEP).

    The defaults are those of the authors' code: the router reads the un-normalised stream, takes a softmax over all
    paths and renormalises the top k; every block attends to all tokens; the loss is Switch Transformer's.
    """

    chooses_paths = True

    @dataclass
    class Config(RouterConfig):
        residual: bool = False
        """Whether the layer's input is added to the join's output."""
        scope: Scope = "all"
        """Whether a block attends to all tokens, or only to those routed to it."""
        per: Literal["block", "sublayer"] = "block"
        """What a router chooses: whole blocks with their norms and residuals; or attention and feed-forward, each with
        a router of its own on the normalised stream, with one norm before it and the residual outside."""

    def __init__(self, config: Config, shape: JoinShape):
        super().__init__(JoinConfig(residual=config.residual), shape)
        self.config, self.scope = config, config.scope
        self.router = TopKRouter(config, shape.width_in, shape.names)

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        routing = self.router(stream)
        return self.weigh(outputs, routing), (routing,)

    def weigh(self, outputs: list[Tensor], routing: Routing) -> Tensor:
        """The weighted sum of the outputs of all paths."""
        stacked = torch.stack(self.to_stream_width(outputs))
        return self.to_width_out(torch.einsum("pbtw,btp->btw", stacked, routing.weights_BTN.to(stacked.dtype)))

    def run(self, layer: ParallelLayer, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        """Run the router first, then the chosen blocks only or all of them."""
        routings: Routings
        routing = self.router(hidden)
        span = span_for_scope(routing, span, self.scope)
        if self._can_be_sparse(layer) and is_sparse(layer.compute, hidden) and not span.needs_weights:
            permutation = sort_by_expert(routing.chosen_BTK.flatten(0, 1), len(self.names))
            rows = permutation.gather(hidden.flatten(0, 1))
            for block in layer.stack or ():
                rows = run_rows(block, rows, permutation, span, hidden if self.scope == "all" else None)
            combined = permutation.combine(rows, routing.weights_BTK.flatten(0, 1)).view_as(hidden)
            joined, routings = self.to_width_out(combined), ()
        else:
            outputs, routings = layer.outputs(hidden, span, routing.takers_NBT)
            joined = self.weigh(outputs, routing)
        return (hidden + joined if self.residual else joined), (*routings, routing)

    def _can_be_sparse(self, layer: ParallelLayer) -> bool:
        """Whether only the chosen blocks can be computed: a second block that reads all tokens needs all outputs."""
        if layer.stack is None or layer.enter is not None or len(self.leave):
            return False
        return len(layer.stack) == 1 or (self.scope == "routed" and len(layer.stack) > 1)

    def set_costs(self, layer: ParallelLayer) -> None:
        share = self.config.top_k / len(self.names)
        for block in (layer.stack or ()) if self._can_be_sparse(layer) else ():
            set_active_share(block, share)
            set_active_attention_share(block.attention, share, self.scope)

    @staticmethod
    def experts_for_paths(config: ParallelStage.Config, paths: list[Any], width: int) -> BlockConfig:
        """A block whose attention experts and feed-forward experts are those of the paths."""
        join, first = config.join.options, paths[0]
        if not of_one_shape(paths):
            raise BraidError("paths chosen per sublayer must be of one shape: give them the same options")
        if first.width != width or (config.to or width) != width:
            todo = "Leave out width and `to`; heads, head_dim and hidden make the paths narrow."
            raise BraidError("paths chosen per sublayer read and write the stream as it is", todo=todo)
        if first.depth != config.layers:
            raise BraidError("paths chosen per sublayer have one block in each layer: leave out depth")
        names = [path.name for path in paths]
        router = RouterConfig(**{field.name: getattr(join, field.name) for field in fields(RouterConfig)})
        attention = replace(first.attention.options, experts=AttentionExpertsConfig(names, router, join.scope))
        feed = replace(first.feed.options, experts=FeedExpertsConfig(names, router))
        return BlockConfig(
            norm=first.norm,
            attention=Choice(first.attention.kind, attention),
            feed=Choice(first.feed.kind, feed),
            dropout=first.dropout,
        )


def run_rows(block: Any, rows: Tensor, permutation: Permutation, span: Span, stream: Tensor | None = None) -> Tensor:
    """Run each member of a stack of blocks on the rows of the tokens that chose it, [row, width] in and out. With
    `stream` [batch, time, width], keys and values are those of all its tokens; otherwise those of the rows."""
    groups = permutation.groups
    normed = block.attention_norm(rows, groups) if stream is None else block.attention_norm(stream[None])
    rows = rows + block.drop(block.attention.forward_routed(normed, permutation, span))
    feed_output, _ = block.feed(block.feed_norm(rows, groups), groups)
    return rows + block.drop(feed_output)  # type: ignore[no-any-return]
