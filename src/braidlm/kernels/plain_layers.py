"""Parts that kernels do not serve, by their own forward inside the pass; on a GPU each is compiled by torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, add_pending
from braidlm.kernels.dense_layers import Sublayer
from braidlm.model.routing.routing import Routings


class PlainForward:
    """The forward of layers, attentions and feed-forward parts. A compiled one makes its own span of the pass."""

    def __init__(self, body: Any, compiled: bool):
        self.body = body
        self.forwards: dict[str, Callable[..., Any]] = {
            "layer": self._layer,
            "attention": self._attention,
            "feed": self._feed,
        }
        if compiled:
            self.forwards = {kind: torch.compile(forward, dynamic=False) for kind, forward in self.forwards.items()}

    def layer(
        self, stream: Tensor, pending: PendingAdd | None, layer: Any, context: PassContext
    ) -> tuple[Tensor, None, Routings]:
        """A whole layer."""
        with context.autocast():
            hidden, routings = self.forwards["layer"](layer, context.unflattened(add_pending(stream, pending)))
        return hidden.flatten(0, 1).to(context.dtype), None, routings

    def sublayer(
        self, kind: str, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
    ) -> Sublayer:
        """The `attention` or `feed` of a block with its norm."""
        stream = add_pending(stream, pending)
        with context.autocast():
            delta, routings = self.forwards[kind](norm, part, context.unflattened(stream))
        return stream, PendingAdd(delta.flatten(0, 1).to(stream.dtype)), routings

    def _layer(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Routings]:
        return layer(hidden, self.body.span(hidden))

    def _attention(self, norm: Any, part: Any, hidden: Tensor) -> tuple[Tensor, Routings]:
        return part(norm(hidden), self.body.span(hidden))

    def _feed(self, norm: Any, part: Any, hidden: Tensor) -> tuple[Tensor, Routings]:
        return part(norm(hidden))
