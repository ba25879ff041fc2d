"""The next-token loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a position that is not trained on
NO_SHARE = -1e4  # the logarithm of a share that is 0 in every type; infinity would have no gradient


def best_alone(logarithms: Tensor) -> Tensor:
    """The logarithms of shares [..., choice] in which the largest has all."""
    best = logarithms.argmax(-1, keepdim=True)
    return torch.full_like(logarithms, NO_SHARE).scatter(-1, best, 0.0)


def next_token_loss(logits: Tensor, labels: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Cross entropy of labels that are already at the position predicting them. The sum over labels is divided by
    `count`, by default their number; with gradient accumulation or several processes the caller passes the count of the
    whole batch, so that every token has the same weight."""
    flat, targets = _in_float32(logits.flatten(0, -2)), labels.flatten()
    if count is None:
        return F.cross_entropy(flat, targets, ignore_index=IGNORED)
    return F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum") / count


def log_probabilities_of(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """[token] of each of `tokens`, predicted by the row of logits [row, vocabulary] that `rows` [token] says."""
    logits = _in_float32(logits)
    return logits[rows, tokens] - logits.logsumexp(-1)[rows]


def shift_labels(labels: Tensor) -> Tensor:
    """Move transformers' labels (equal to the inputs) to the positions that predict them."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def _in_float32(logits: Tensor) -> Tensor:
    """The logits in float32, or in float64 where they have it."""
    return logits if logits.dtype == torch.float64 else logits.float()


def share_of_batch(real: Tensor, count: Tensor | float | None) -> Tensor | float:
    """The weight of a micro-batch's routing loss: its share of the batch's tokens, as for the next-token loss."""
    return 1.0 if count is None else real.sum() / count
