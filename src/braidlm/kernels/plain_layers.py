"""Parts that kernels do not serve, by their own forward inside the pass; on a GPU each is compiled by torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.kernels.context import PassContext, PendingAdd, Sublayer, add_pending
from braidlm.model.routing.routing import Routings


class PlainForward:
    """The forward of layers, attentions and feed-forward parts. A compiled one makes its own span of the pass."""

    def __init__(self, body: Any, compiled: bool):
        self.body, self.compiled = body, compiled
        self.routers: dict[nn.Module, dict[str, Any]] = {}
        """The routers of each part that is compiled, by their names inside it."""
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
            hidden, routings = self._run("layer", layer, context.unflattened(add_pending(stream, pending)))
        return hidden.flatten(0, 1).to(context.dtype), None, routings

    def sublayer(
        self, kind: str, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
    ) -> Sublayer:
        """The `attention` or `feed` of a block with its norm."""
        stream = add_pending(stream, pending)
        with context.autocast():
            delta, routings = self._run(kind, part, context.unflattened(stream), norm)
        return stream, PendingAdd(delta.flatten(0, 1).to(stream.dtype)), routings

    def _run(self, kind: str, part: nn.Module, *inputs: Any) -> tuple[Tensor, Routings]:
        if not self.compiled:
            return self.forwards[kind](part, *inputs)  # type: ignore[no-any-return]
        if part not in self.routers:
            self.routers[part] = {n: module for n, module in part.named_modules() if hasattr(module, "address")}
        with _named_inside(self.routers[part]) as names:
            hidden, routings = self.forwards[kind](part, *inputs)
        return hidden, tuple(replace(routing, name=names.get(routing.name, routing.name)) for routing in routings)

    def _layer(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Routings]:
        return layer(hidden, self.body.span(hidden))

    def _attention(self, part: Any, hidden: Tensor, norm: Any) -> tuple[Tensor, Routings]:
        return part(norm(hidden), self.body.span(hidden))

    def _feed(self, part: Any, hidden: Tensor, norm: Any) -> tuple[Tensor, Routings]:
        return part(norm(hidden))


@contextmanager
def _named_inside(routers: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Let routers have the names that they have inside a layer, which those of the other layers have too.

    Routings carry names, and torch compiles a layer anew for every name, eight times at most. Yields the routers' own
    names by those.
    """
    names = {name: router.address for name, router in routers.items()}
    for name, router in routers.items():
        router.address = name
    try:
        yield names
    finally:
        for name, router in routers.items():
            router.address = names[name]
