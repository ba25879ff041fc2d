"""One transformer layer: attention and feed-forward, each normalised before and added to the stream."""

from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor, nn

from .attention import attentions
from .dropout import BlockDropout, Dropout
from .feed import feeds
from .norms import norms
from .registry import Choice, Registry
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
    """Pre-norm residual block, width in = width out; with `stack`, as many blocks of one shape computed as one."""

    def __init__(self, config: BlockConfig, width: int, stack: int | None = None):
        super().__init__()
        stacked = {} if stack is None else {"stack": stack}
        self.attention_norm = norms.build(config.norm, width, **stacked)
        self.attention = attentions.build(config.attention, width, dropout=config.dropout.attention, **stacked)
        self.feed_norm = norms.build(config.norm, width, **stacked)
        self.feed = feeds.build(config.feed, width, **stacked)
        self.drop = Dropout(config.dropout.residual)

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        mixed, attention_routings = self.attention(self.attention_norm(hidden), span)
        hidden = hidden + self.drop(mixed)
        fed, feed_routings = self.feed(self.feed_norm(hidden))
        return hidden + self.drop(fed), attention_routings + feed_routings


def can_stack(config: BlockConfig) -> bool:
    """Whether every part of the block knows how to be computed as a stack; other packages' parts may not."""
    chosen: list[tuple[Registry, Choice]] = [(norms, config.norm), (attentions, config.attention), (feeds, config.feed)]
    return all(getattr(registry[choice.kind], "stackable", False) for registry, choice in chosen)
