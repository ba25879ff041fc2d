"""Dropout on embeddings, attention probabilities and residuals; a training schedule may scale its rate."""

from dataclasses import dataclass, fields

import torch.nn.functional as F
from torch import Tensor, nn

from .config.ranges import Rate


@dataclass
class BlockDropout:
    """One rate for both kinds inside a block (`dropout: 0.1`) or one each."""

    attention: Rate = 0.0
    """On attention probabilities."""
    residual: Rate = 0.0
    """On the outputs of attention and feed-forward, before they are added to the stream."""

    @classmethod
    def from_shorthand(cls, rate: float) -> dict[str, float]:
        return {field.name: rate for field in fields(cls)}


@dataclass
class DropoutConfig(BlockDropout):
    """One rate for all but layers (`dropout: 0.1`) or one each; blocks inherit theirs from it."""

    embedding: Rate = 0.0
    """On the sum of token and position embeddings."""
    layer: Rate = 0.0
    """Of whole layers (LayerSkip): how often a text passes by the last; it rises from 0 at the first, exponentially."""

    @classmethod
    def from_shorthand(cls, rate: float) -> dict[str, float]:
        return {**BlockDropout.from_shorthand(rate), "embedding": rate}


class Dropout(nn.Module):
    """Dropout at `rate` times `scale`; a schedule changes `scale` between steps."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.scale = 1.0

    @property
    def probability(self) -> float:
        return self.rate * self.scale if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        probability = self.probability
        return F.dropout(x, probability) if probability > 0.0 else x

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def scale_dropout(model: nn.Module, scale: float) -> None:
    """Set every dropout of a model to `scale` times its configured rate."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.scale = scale
