"""Whole models, by kernels or by their plain forward: their outputs and the gradient of every parameter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from braidlm.model.routing.losses import routing_loss
from braidlm.model.routing.routing import Routings


def plain_stream(model: Any, ids: Tensor) -> tuple[Tensor, Routings]:
    embedded = model.embedding(ids)
    return model.stream(embedded, model.span(embedded))


def results(
    model: Any, stream: Callable[[Tensor], tuple[Any, ...]], ids: Tensor, weights: Tensor, dtype: torch.dtype, side: Any
) -> dict[str, Tensor]:
    """The stream, the weights of routings, and the gradient of every parameter."""
    model.zero_grad()
    with torch.autocast(ids.device.type, dtype, enabled=dtype == torch.bfloat16):
        hidden, routings, *_ = stream(ids)
    added = routing_loss(routings, torch.ones_like(ids)) if routings else 0.0
    ((hidden * weights).sum() + 30 * added).backward()
    if side is not None:
        side.synchronize()
    outputs = {"stream": hidden.detach()} | {f"{r.name} weights": r.weights_BTN.detach() for r in routings}
    return outputs | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
