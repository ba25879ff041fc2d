"""The routed join: the top k of the paths' blocks for each token, chosen before they are computed (MoEP)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..attention.attention import Scope
from ..routing.router import RouterConfig, TopKRouter
from ..routing.routing import Routing, Routings
from .joins import JoinConfig, JoinShape, SameWidthJoin, joins


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

    def finish(self, joined: Tensor, stream: Tensor) -> Tensor:
        """Project the weighted sum of the chosen paths to the output width and add the residual."""
        joined = self.to_width_out(joined)
        return stream + joined if self.residual else joined
