"""Losses of next tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The label of a position that is not trained on."""


def next_token_loss(logits: Tensor, labels: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Cross entropy of labels that are already at the position predicting them.

    The sum over labels is divided by `count` (by default their number): with accumulation or several processes the
    caller gives the count of the whole batch, so that every token weighs the same.
    """
    flat, targets = logits.flatten(0, -2), labels.flatten()
    if count is None:
        return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED)
    return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED, reduction="sum") / count


def shift_labels(labels: Tensor) -> Tensor:
    """Hugging Face's labels (equal to the inputs) moved to the position that predicts them."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


class HeadLoss(torch.autograd.Function):
    """hidden [rows, width], weight [vocabulary, width], labels [rows], count [] -> summed loss / count.

    The logits become their own gradient in place: autograd would keep logits and probabilities and allocate a third
    tensor of that size. The product is computed in the type of `hidden`; the weight may be wider. The reference is
    `next_token_loss` of the head's output.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        cast = weight.to(hidden.dtype)
        logits = hidden @ cast.t()
        losses = logits_to_gradient_(logits, labels)
        ctx.save_for_backward(logits, hidden, cast, count)
        ctx.weight_dtype = weight.dtype
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, hidden, cast, count = ctx.saved_tensors
        factor, (needs_hidden, needs_weight) = upstream / count, ctx.needs_input_grad[:2]
        hidden_gradient = (gradient @ cast).mul_(factor) if needs_hidden else None
        weight_gradient = (gradient.t() @ hidden).to(ctx.weight_dtype).mul_(factor) if needs_weight else None
        return hidden_gradient, weight_gradient, None, None


def logits_to_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses [rows] of logits [rows, vocabulary], which become the gradient of the losses' sum."""
    counted = labels != IGNORED
    targets = torch.where(counted, labels, 0)[:, None]
    target_logits = logits.gather(1, targets)
    highest = logits.amax(-1, keepdim=True)
    torch.softmax(logits, -1, out=logits)
    # The probability of the highest logit is never too small for its logarithm.
    log_total = highest - logits.amax(-1, keepdim=True).log()
    logits.scatter_add_(1, targets, torch.full_like(target_logits, -1.0))
    if logits.is_cuda or not bool(counted.all()):  # on a GPU the question itself would wait for the device
        logits.masked_fill_(~counted[:, None], 0.0)
    return torch.where(counted, (log_total - target_logits)[:, 0], 0.0)
