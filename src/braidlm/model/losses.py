"""Losses: pure functions of what the model returned."""

import torch.nn.functional as F
from torch import Tensor

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


def shift_labels(labels: Tensor) -> Tensor:
    """Hugging Face's labels (equal to the inputs) moved to the position that predicts them."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)
