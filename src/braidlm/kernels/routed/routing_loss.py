"""The losses of routers on the side stream, while the main stream runs the head: many small operations.

The gradient is computed together with the loss. The reference is `routing.losses.routing_loss` under autograd.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.routed.choice_means import evaluate_means
from braidlm.kernels.side_stream import current_side_stream, on_side
from braidlm.model.routing.losses import routing_loss
from braidlm.model.routing.routing import Routings

READ = ("probabilities_BTN", "weights_BTK", "scores_BTN", "new_rows")
"""The fields of a routing through which a loss has gradients."""


class RoutingLoss(torch.autograd.Function):
    """Routings, real tokens, the tokens of the whole batch, all differentiable tensors of the routings -> the loss.

    The loss and its gradient are complete when the side stream is synchronized.
    """

    @staticmethod
    def forward(ctx: Any, routings: Routings, real_BT: Tensor, count: Tensor | float | None, *parts: Tensor) -> Tensor:
        with on_side(current_side_stream(), real_BT, *parts, priority=True), torch.enable_grad():
            leaves = [part.detach().requires_grad_() for part in parts]
            share = 1.0 if count is None else real_BT.sum() / count
            loss = routing_loss(_with_parts(routings, leaves), real_BT, evaluate_means) * share
            gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        ctx.present = [gradient is not None for gradient in gradients]
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        return loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = iter(torch._foreach_mul(list(ctx.saved_tensors), upstream) if ctx.saved_tensors else ())
        return *[None] * 3, *(next(scaled) if present else None for present in ctx.present)


def routing_loss_on_side(routings: Routings, real_BT: Tensor, count: Tensor | float | None) -> Tensor:
    """`RoutingLoss` with the tensors of the routings."""
    parts = [getattr(routing, name) for routing in routings for name in READ]
    return RoutingLoss.apply(routings, real_BT, count, *(part for part in parts if part is not None))


def _with_parts(routings: Routings, parts: list[Tensor]) -> Routings:
    """The same routings with other tensors."""
    remaining = iter(parts)
    replaced = []
    for routing in routings:
        leaves: dict[str, Any] = {name: next(remaining) for name in READ if getattr(routing, name) is not None}
        replaced.append(replace(routing, **leaves))
    return tuple(replaced)
