"""Losses: pure functions of what the model returned."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from braidlm.kernels.ops.head_loss import HeadLoss
from braidlm.kernels.side_stream import DeferredGradient, SideStream

IGNORED = -100
"""The label of a position that is not trained on."""


def next_token_loss(logits: Tensor, labels: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Cross entropy of labels that already stand at the position predicting them.

    The sum over labels is divided by `count` (by default config many there are): with accumulation or several processes
    the caller gives the count of the whole batch, so that every token weighs the same.
    """
    flat, targets = logits.flatten(0, -2), labels.flatten()
    if count is None:
        return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED)
    return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED, reduction="sum") / count


def head_loss(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    count: Tensor | float | None = None,
    side: SideStream | None = None,
    tied: DeferredGradient | None = None,
    copy: Tensor | None = None,
) -> Tensor:
    """The training loss of a stream [batch, time, width] under a head: `next_token_loss` of its scores, fused.

    `copy` is the head's matrix in the type of the product, where the caller has it; with `tied`, the gradient of the
    matrix is left there.
    """
    # Evaluation keeps to the plain context: it needs no gradient, and its numbers should be the reference's own.
    if not torch.is_grad_enabled() or getattr(head, "bias", None) is not None:
        return next_token_loss(head(hidden), labels, count)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    found = (labels != IGNORED).sum() if count is None else count
    total = torch.as_tensor(found, dtype=torch.float32, device=hidden.device)
    return _fused(hidden.flatten(0, -2).to(dtype), head.weight, copy, labels.flatten(), total, side, tied)


@torch.compiler.disable  # faster than traced in the one trial there was (LOG.md)
def _fused(
    rows: Tensor,
    weight: Tensor,
    copy: Tensor | None,
    labels: Tensor,
    count: Tensor,
    side: SideStream | None,
    tied: DeferredGradient | None,
) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        return HeadLoss.apply(rows, weight, copy, labels, count, IGNORED, side, tied)


def shift_labels(labels: Tensor) -> Tensor:
    """Hugging Face's labels (equal to the inputs) moved to the position that predicts them."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)
