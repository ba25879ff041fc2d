"""Dropout by kind, of values, layers and experts; a training schedule may scale all rates."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config.ranges import Rate


@dataclass
class BlockDropout:
    """One rate for attention and residual (`dropout: 0.1`), or one for each kind."""

    attention: Rate = 0.0
    """On attention probabilities."""
    residual: Rate = 0.0
    """On the outputs of attention and feed-forward, before they are added to the stream."""
    feed: Rate = 0.0
    """On the inner activations of feed-forward parts, those of experts too."""
    expert_outputs: Rate = 0.0
    """On what each attention or feed-forward expert gives, before the weighted sum."""
    experts: Rate = 0.0
    """How often one of a token's experts is left out; the others, of which one stays, take over its weight. The model's
    own rate also leaves out projections and routed paths."""

    @classmethod
    def from_shorthand(cls, rate: float) -> dict[str, float]:
        return {"attention": rate, "residual": rate}


@dataclass
class DropoutConfig(BlockDropout):
    """One rate for attention, residual and embedding (`dropout: 0.1`) or one each; blocks inherit theirs from it."""

    embedding: Rate = 0.0
    """On the sum of token and position embeddings."""
    layer: Rate = 0.0
    """How often a text passes by the last layer (LayerSkip); the rate rises from 0 at the first, exponentially."""

    @classmethod
    def from_shorthand(cls, rate: float) -> dict[str, float]:
        return {**BlockDropout.from_shorthand(rate), "embedding": rate}


class Dropout(nn.Module):
    """Dropout at `rate` times `scale`; a schedule changes `scale` between steps."""

    is_recorded = True
    """Whether a captured or compiled step holds the probability itself, so that another one needs another step."""

    def __init__(self, rate: float = 0.0, kind: str = ""):
        """With `kind`, the rate is that of the block or else of the model around it."""
        super().__init__()
        self.rate, self.kind, self.scale = rate, kind, 1.0
        self.is_set = not kind

    def set_scale(self, scale: float, device: torch.device) -> None:
        self.scale = scale

    @property
    def probability(self) -> float:
        return self.rate * self.scale if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        probability = self.probability
        return F.dropout(x, probability) if probability > 0.0 else x

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def set_rates(part: nn.Module, rates: BlockDropout) -> None:
    """Give dropouts of a kind their rate; those of an inner part that were set before keep theirs."""
    for drop in part.modules():
        if isinstance(drop, Dropout) and not drop.is_set:
            drop.rate, drop.is_set = getattr(rates, drop.kind), True


def leave_out(weights_BTK: Tensor, rate: float) -> Tensor:
    """Leave out each chosen one at `rate`; the others take over its weight, and where nothing is left all stay."""
    kept_BTK = weights_BTK * (torch.rand_like(weights_BTK) >= rate)
    total, rest = weights_BTK.sum(-1, keepdim=True), kept_BTK.sum(-1, keepdim=True)
    enough = rest > 1e-6 * total  # less would have gradients out of all proportion
    return torch.where(enough, kept_BTK * (total / torch.where(enough, rest, 1.0)), weights_BTK)


def scale_dropout(model: nn.Module, scale: float) -> None:
    """Set every dropout of a model to `scale` times its configured rate."""
    device = next(model.parameters()).device
    for module in model.modules():
        if isinstance(module, Dropout):
            module.set_scale(scale, device)
