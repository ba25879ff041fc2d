"""What routers ask to be added to the loss, computed beside the head: many small operations that nobody waits for.

Its gradient is made in the same piece of work. The reference is `routing_losses.routing_loss` under autograd.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.side_stream import current_side_stream, on_side
from braidlm.model.routing.losses import routing_loss
from braidlm.model.routing.routing import Routings

READ = ("probabilities_BTN", "weights_BTK", "scores_BTN")
"""What a loss may be differentiated by."""


class RoutingLoss(torch.autograd.Function):
    """Routings, which tokens are real, the share of the batch that they are, all parts of the routings that are read ->
    what they ask for. It is there, and so is its gradient, when the side stream is synchronized.
    """

    @staticmethod
    def forward(
        ctx: Any,
        routings: Routings,
        real_BT: Tensor,
        count: Tensor | float | None,
        *parts: Tensor,
    ) -> Tensor:
        with on_side(current_side_stream(), real_BT, *parts, priority=True), torch.enable_grad():
            own = [part.detach().requires_grad_() for part in parts]
            share = 1.0 if count is None else real_BT.sum() / count
            asked = routing_loss(_with_parts(routings, own), real_BT) * share
            gradients: tuple[Tensor | None, ...] = (None,) * len(own)
            if asked.requires_grad:
                gradients = torch.autograd.grad(asked, own, allow_unused=True)
        ctx.there = [gradient is not None for gradient in gradients]
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        return asked.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = iter(torch._foreach_mul(list(ctx.saved_tensors), upstream) if ctx.saved_tensors else ())
        return *[None] * 3, *(next(scaled) if there else None for there in ctx.there)


def routing_loss_on_side(routings: Routings, real_BT: Tensor, count: Tensor | float | None) -> Tensor:
    """`RoutingLoss` of routings."""
    parts = [getattr(routing, name) for routing in routings for name in READ]
    return RoutingLoss.apply(routings, real_BT, count, *(part for part in parts if part is not None))


def _with_parts(routings: Routings, parts: list[Tensor]) -> Routings:
    """The same routings of other tensors."""
    rest = iter(parts)
    made = []
    for routing in routings:
        own: dict[str, Any] = {name: next(rest) for name in READ if getattr(routing, name) is not None}
        made.append(replace(routing, **own))
    return tuple(made)
