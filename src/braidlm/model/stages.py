"""Stages: an architecture is a list of them. The first kind is a stack of blocks, each one transformer layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention.attention import attentions
from .attention.experts import attention_part
from .config.ranges import Layers
from .config.registry import Choice, Registry, inherit
from .config.strict import PartOf
from .dropout import BlockDropout, Dropout, set_rates
from .errors import BraidError
from .feed.feeds import feed_part, feeds
from .norms import norms
from .routing.router import TopKRouter
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


stage_kinds = Registry("stage", third_party=True)
sharings = Registry("sharing", third_party=True)


class Stage(nn.Module):
    """The base class: `forward` takes a stream and returns a stream of `width_out` and routings.

    By default it runs `layers` in order.
    """

    width_out: int
    layers: nn.ModuleList
    names: tuple[str, ...] = ()
    """The names of its paths, if it has any."""
    gradient_checkpointing = False
    """Set by transformers' `gradient_checkpointing_enable`: only the stream between layers is kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.drops: nn.ModuleList | None = None
        """For each layer, its `LayerDropout`."""

    def run(self, layer: nn.Module, hidden: Tensor, *args: Any) -> Any:
        """Call a layer, which is recomputed in the backward pass if checkpointing is on."""
        if self.gradient_checkpointing and self.training:
            return checkpoint(layer, hidden, *args, use_reentrant=False)
        return layer(hidden, *args)

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        return self.run_some(range(len(self.layers)), hidden, span)

    def run_some(self, indices: range, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        """Run the layers of these indices."""
        routings: Routings = ()
        for index in indices:
            run = partial(self.run, self.layers[index])
            drop: Any = None if self.drops is None else self.drops[index]
            hidden, layer_routings = run(hidden, span) if drop is None else drop.run(run, hidden, span)
            routings += layer_routings
            if span.record is not None:
                span.record.end_layer(hidden)
        return hidden, routings

    def use_paths(self, active: frozenset[str]) -> None:
        """Make only these of its paths active."""

    def path_routers(self) -> Iterable[TopKRouter]:
        """Its routers that choose among paths; all others choose among modules."""
        return ()

    def paths_and_joins(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """What belongs to its paths, and what brings a stream to them and joins them: each can be frozen."""
        return [], []


def share_weights(choice: Choice | None, rows: Iterable[Sequence[nn.Module]]) -> None:
    """Let blocks of one shape that follow one another share weights, as a stage's option `share` says."""
    for blocks in rows if choice is not None else ():
        sharings.build(choice)(blocks)  # type: ignore[arg-type]


@stage_kinds.register("block")
class BlockStage(Stage):
    """One block, or `layers` of them in a row."""

    @dataclass
    class Config(BlockConfig):
        layers: Layers = 1
        """Number of blocks in a row."""
        share: Annotated[Choice, PartOf(sharings)] | None = None
        """What the blocks share: `feeds`, `attentions` or `blocks`; by default each has weights of its own."""

    @classmethod
    def inherit(cls, options: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
        """Options that a stage does not set come from the architecture's `block`."""
        return inherit(template, options)

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config, width) for _ in range(config.layers))
        self.width_out = width
        share_weights(config.share, [list(self.layers)])
