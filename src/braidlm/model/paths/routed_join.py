"""The routed join: for each token the top k of the paths' blocks, chosen before they are computed (MoEP)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..attention.softmax import Scope
from ..routing.router import RouterConfig, TopKRouter
from ..routing.routing import Routing, Routings
from .joins import JoinConfig, JoinShape, SameWidthJoin, joins


@joins.register("routed")
class Routed(SameWidthJoin):
    """A router reads the stream and picks a few paths for each token; their outputs are summed by its weights (MoEP).

    By default as in the authors' code: the router reads the un-normalised stream, a softmax over all, the top k made to
    add up to 1, every block attending to all tokens, the Switch loss.
    """

    @dataclass
    class Config(RouterConfig):
        residual: bool = False
        """Whether what came into the layer is added to what the join makes."""
        scope: Scope = "all"
        """Whose keys and values a block has: of all tokens, or only of the tokens routed to it."""
        per: Literal["block", "sublayer"] = "block"
        """What is chosen: whole blocks, each with its norms and residuals inside; or attention and feed-forward each by
        a router of its own on the normalised stream, with one norm before and the residual outside."""

    def __init__(self, config: Config, shape: JoinShape):
        super().__init__(JoinConfig(residual=config.residual), shape)
        self.config, self.scope = config, config.scope
        self.router = TopKRouter(config, shape.width_in, shape.names)

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        routing = self.router(stream)
        return self.weigh(outputs, routing), (routing,)

    def weigh(self, outputs: list[Tensor], routing: Routing) -> Tensor:
        """The outputs of all paths for every token, by the router's weights."""
        every = torch.stack(self.to_stream_width(outputs))
        return self.to_width_out(torch.einsum("pbtw,btp->btw", every, routing.weights_BTN.to(every.dtype)))

    def finish(self, joined: Tensor, stream: Tensor) -> Tensor:
        """What the paths' weighted sum becomes where it was computed for the chosen ones only."""
        joined = self.to_width_out(joined)
        return stream + joined if self.residual else joined
