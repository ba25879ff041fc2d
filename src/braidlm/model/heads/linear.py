"""The linear head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..precision import compute_dtype
from .embedding import Embedding, TokenEmbedding
from .head import Head, heads
from .losses import IGNORED, HeadLoss


@heads.register("linear")
class LinearHead(Head, nn.Linear):
    """A linear layer to logits; it may share its matrix with the embedding."""

    composed = {"weight": "side by side", "bias": "added up"}

    @dataclass
    class Config:
        bias: bool = False
        """Whether each token has a learned bias."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(width, vocab_size, bias=config.bias)
        self.config = config

    @classmethod
    def composed_config(cls, configs: Sequence[Config]) -> Config:
        return cls.Config(bias=any(config.bias for config in configs))

    def shared_with(self, embedding: Embedding) -> dict[str, str]:
        return {"weight": "weight"} if isinstance(embedding, TokenEmbedding) else {}

    def loss(
        self, hidden: Tensor, targets: Tensor, count: Tensor | float | None = None, logits: Tensor | None = None
    ) -> Tensor:
        """The same in less memory: in training the logits are overwritten by their gradient."""
        # Without gradients this saves no memory, and evaluation should give exactly the reference's numbers.
        if logits is not None or not torch.is_grad_enabled() or self.bias is not None:
            return super().loss(hidden, targets, count, logits)
        total = (targets != IGNORED).sum() if count is None else count
        total = torch.as_tensor(total, dtype=torch.float32, device=hidden.device)
        return _head_loss(hidden.flatten(0, -2).to(compute_dtype(hidden)), self.weight, targets.flatten(), total)


@torch.compiler.disable  # eager was faster than traced in a trial (LOG.md)
def _head_loss(rows: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        return HeadLoss.apply(rows, weight, labels, count)
