"""Heads: from vectors to logits and to the loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config.registry import Registry
from .losses import IGNORED, HeadLoss, next_token_loss

heads = Registry("head", third_party=True)


@heads.register("linear")
class LinearHead(nn.Linear):
    """A linear layer to logits; it may share its matrix with the embedding."""

    @dataclass
    class Config:
        bias: bool = False
        """Whether each token has a learned bias."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(width, vocab_size, bias=config.bias)
        self.config = config

    def loss(self, hidden: Tensor, targets: Tensor, count: Tensor | float | None = None) -> Tensor:
        """The loss of targets [batch, time], each at the position that predicts it, from a stream [batch, time, width].

        It equals `next_token_loss` of the logits; in training these are overwritten by their gradient to save memory.
        """
        # Without gradients this saves no memory, and evaluation should give exactly the reference's numbers.
        if not torch.is_grad_enabled() or self.bias is not None:
            return next_token_loss(self(hidden), targets, count)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        total = (targets != IGNORED).sum() if count is None else count
        total = torch.as_tensor(total, dtype=torch.float32, device=hidden.device)
        return _head_loss(hidden.flatten(0, -2).to(dtype), self.weight, targets.flatten(), total)


@torch.compiler.disable  # eager was faster than traced in a trial (LOG.md)
def _head_loss(rows: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        return HeadLoss.apply(rows, weight, labels, count)
