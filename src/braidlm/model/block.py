"""One transformer layer: attention and feed-forward, each with a norm before it and a residual around it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor, nn

from .attention.attention import attentions
from .attention.routed import attention_part
from .config.registry import Choice, Registry
from .config.strict import PartOf
from .dropout import BlockDropout, Dropout, set_rates
from .errors import BraidError
from .feed.feeds import feeds
from .feed.routed import feed_part
from .norms import norms
from .routing.routing import Routings
from .routing.stacked import stack_kwargs
from .span import Span


@dataclass
class BlockConfig:
    """The parts of a block."""

    norm: Annotated[Choice, PartOf(norms, "rms")] = "rms"  # type: ignore[assignment]
    """Before attention and before feed-forward."""
    attention: Annotated[Choice, PartOf(attentions, "softmax")] = "softmax"  # type: ignore[assignment]
    """How tokens attend to each other."""
    feed: Annotated[Choice, PartOf(feeds, "swiglu")] = "swiglu"  # type: ignore[assignment]
    """How each token is transformed on its own."""
    dropout: BlockDropout = field(default_factory=BlockDropout)
    """By default the model's."""


class Block(nn.Module):
    """Pre-norm residual block, width in = width out; with `stack`, that many blocks of one shape computed as one."""

    def __init__(self, config: BlockConfig, width: int, stack: int | None = None, members: Sequence[str] = ()):
        """`members` are the names of the paths in a stack, which the records of routers in it carry."""
        super().__init__()
        self.config = config
        self.attention_norm = norms.build(config.norm, width, **stack_kwargs(stack))
        self.attention = attention_part(config.attention, width, config.dropout.attention, stack, members)
        self.feed_norm = norms.build(config.norm, width, **stack_kwargs(stack))
        self.feed = feed_part(config.feed, width, stack, members)
        self.drop = Dropout(config.dropout.residual)
        set_rates(self, config.dropout)
        if config.dropout.feed and not any(getattr(part, "kind", None) == "feed" for part in self.feed.modules()):
            raise BraidError(f"feed-forward '{config.feed.kind}' has no dropout of inner activations (dropout.feed)")

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        attention_output, attention_routings = self.attention(self.attention_norm(hidden), span)
        hidden = hidden + self.drop(attention_output)
        feed_output, feed_routings = self.feed(self.feed_norm(hidden))
        return hidden + self.drop(feed_output), attention_routings + feed_routings


def can_stack(config: BlockConfig, with_experts: bool = False) -> bool:
    """Whether every part of the block can be stacked; experts and parts of other packages may not be."""
    banks = [getattr(part.options, "experts", None) for part in (config.attention, config.feed)]
    for experts in filter(None, banks):
        if not with_experts or experts.router.new:  # of inserted modules some rows are trained
            return False
    chosen: list[tuple[Registry, Choice]] = [(norms, config.norm), (attentions, config.attention), (feeds, config.feed)]
    return all(getattr(registry[choice.kind], "stackable", False) for registry, choice in chosen)
