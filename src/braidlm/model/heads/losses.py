"""The next-token loss, and the same computed in less memory."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The label of a position that is not trained on."""


def next_token_loss(logits: Tensor, labels: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Cross entropy of labels that are already at the position predicting them.

    The sum over labels is divided by `count`, by default their number; with gradient accumulation or several processes
    the caller passes the count of the whole batch, so that every token has the same weight.
    """
    flat, targets = logits.flatten(0, -2), labels.flatten()
    if count is None:
        return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED)
    return F.cross_entropy(flat.float(), targets, ignore_index=IGNORED, reduction="sum") / count


def log_probabilities_of(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """[token] of each of `tokens`, predicted by the row of logits [row, vocabulary] that `rows` [token] says."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits[rows, tokens] - logits.logsumexp(-1)[rows]


def shift_labels(labels: Tensor) -> Tensor:
    """Move transformers' labels (equal to the inputs) to the positions that predict them."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


class HeadLoss(torch.autograd.Function):
    """hidden [rows, width], weight [vocabulary, width], labels [rows], count [] -> summed loss / count.

    The logits are overwritten by their gradient: autograd would keep logits and probabilities and allocate a third
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
    """Return the losses [rows] of logits [rows, vocabulary], and overwrite the logits by the gradient of their sum."""
    trained = labels != IGNORED
    targets = torch.where(trained, labels, 0)[:, None]
    target_logits = logits.gather(1, targets)
    max_logits = logits.amax(-1, keepdim=True)
    torch.softmax(logits, -1, out=logits)
    # The largest probability never underflows, so that its logarithm is finite.
    log_sum_exp = max_logits - logits.amax(-1, keepdim=True).log()
    logits.scatter_add_(1, targets, torch.full_like(target_logits, -1.0))
    if logits.is_cuda or not bool(trained.all()):  # on a GPU this test would wait for the device
        logits.masked_fill_(~trained[:, None], 0.0)
    return torch.where(trained, (log_sum_exp - target_logits)[:, 0], 0.0)
