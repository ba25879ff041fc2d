"""Losses: pure functions of what the model returned."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HeadLoss: Any = None
try:
    from .head_loss_triton import HeadLoss
except ImportError:  # no Triton here: the plain way serves every device
    pass

IGNORED = -100
"""The label of a position that is not trained on."""


def next_token_loss(logits: Tensor, labels: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Cross entropy of labels that already stand at the position predicting them.

    The sum over labels is divided by `count` (by default how many there are): with accumulation or several processes
    the caller gives the count of the whole batch, so that every token weighs the same.
    """
    flat, targets = logits.flatten(0, -2), labels.flatten()
    if count is None:
        return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED)
    return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED, reduction="sum") / count


def head_loss(head: nn.Module, hidden: Tensor, labels: Tensor, count: Tensor | float) -> Tensor:
    """The loss of a stream [batch, time, width] under a head, by the fused kernel where there is one."""
    if not _can_fuse(head, hidden):
        return next_token_loss(head(hidden), labels, count)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden.dtype
    total = torch.as_tensor(count, dtype=torch.float32, device=hidden.device)
    rows, weight = hidden.flatten(0, -2).to(dtype), head.weight.to(dtype)
    return HeadLoss.apply(rows, weight, labels.flatten(), total, IGNORED)


def _can_fuse(head: nn.Module, hidden: Tensor) -> bool:
    # Evaluation keeps to the plain way: it needs no gradient, and its numbers should be the reference's own.
    return HeadLoss is not None and hidden.is_cuda and torch.is_grad_enabled() and getattr(head, "bias", None) is None


def shift_labels(labels: Tensor) -> Tensor:
    """Hugging Face's labels (equal to the inputs) moved to the position that predicts them."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)
