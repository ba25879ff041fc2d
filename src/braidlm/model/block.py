"""One transformer layer: attention and feed-forward, each normalised before and added to the stream."""

from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor, nn

from .attention import attentions
from .dropout import BlockDropout, Dropout
from .feed import feeds
from .norms import norms
from .registry import Choice
from .routing import Routings
from .span import Span
from .strict import PartOf


@dataclass
class BlockConfig:
    """What a block is made of."""

    norm: Annotated[Choice, PartOf(norms, "rms")] = "rms"  # type: ignore[assignment]
    """Before attention and before feed-forward."""
    attention: Annotated[Choice, PartOf(attentions, "softmax")] = "softmax"  # type: ignore[assignment]
    """How tokens read each other."""
    feed: Annotated[Choice, PartOf(feeds, "swiglu")] = "swiglu"  # type: ignore[assignment]
    """What happens to each token on its own."""
    dropout: BlockDropout = field(default_factory=BlockDropout)
    """By default the model's."""


class Block(nn.Module):
    """Pre-norm residual block, width in = width out."""

    def __init__(self, config: BlockConfig, width: int):
        super().__init__()
        self.attention_norm = norms.build(config.norm, width)
        self.attention = attentions.build(config.attention, width, dropout=config.dropout.attention)
        self.feed_norm = norms.build(config.norm, width)
        self.feed = feeds.build(config.feed, width)
        self.drop = Dropout(config.dropout.residual)

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        mixed, attention_routings = self.attention(self.attention_norm(hidden), span)
        hidden = hidden + self.drop(mixed)
        fed, feed_routings = self.feed(self.feed_norm(hidden))
        return hidden + self.drop(fed), attention_routings + feed_routings
