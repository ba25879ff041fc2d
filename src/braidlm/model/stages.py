"""Stages: an architecture is a list of them. The first kind is a stack of blocks, each one transformer layer.

Blocks in a row may share weights: each use is then a block of its own with its own cache slot, routings and dropout
and, unless whole blocks are shared, norms and routers. Only parameters are shared; the gradients of all uses add up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention.attention import attentions
from .attention.experts import attention_part
from .config.ranges import Layers, Size
from .config.registry import Choice, Registry, inherit
from .config.strict import PartOf
from .dropout import BlockDropout, Dropout, set_rates
from .errors import BraidError
from .feed.feeds import feed_part, feeds
from .norms import norms
from .routing.dispatch import Groups
from .routing.router import TopKRouter
from .routing.routing import Routings
from .routing.stacked import StackedLinear, apply_linear, fill_like_torch, fill_zeros, linear, stack_kwargs
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
    for part in (config.attention, config.feed):
        experts = getattr(part.options, "experts", None)
        if experts and (not with_experts or experts.router.new):  # of inserted modules some rows are trained
            return False
    chosen = ((norms, config.norm), (attentions, config.attention), (feeds, config.feed))
    return all(getattr(registry[choice.kind], "stackable", False) for registry, choice in chosen)


stage_kinds = Registry("stage", third_party=True)
sharings = Registry("sharing", third_party=True)


class Stage(nn.Module):
    """The base class: `forward` takes a stream and returns a stream of `width_out` and routings.

    By default it runs `layers` in order.
    """

    width_out: int
    layers: nn.ModuleList
    names: tuple[str, ...] = ()  # the names of its paths, if it has any
    gradient_checkpointing = False
    """Set by transformers' `gradient_checkpointing_enable`: only the stream between layers is kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.drops: nn.ModuleList | None = None  # for each layer, its `LayerDropout`

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


@dataclass
class SharingConfig:
    """The options of every kind of sharing."""

    layers: Literal["all", "interior"] = "all"
    """Which layers of the stage share: all of them, or all but the first and the last."""
    lora: Size | None = None
    """Rank of a low-rank addition to every shared matrix that each layer has for itself; by default there is none."""


class Sharing:
    """The base class: subclasses say which part of a block is shared."""

    Config = SharingConfig
    part = ""  # the name of the shared part in its block; the whole block by default
    shares_routers = False  # whether routers are shared too; their running balance never is

    def __init__(self, config: SharingConfig):
        self.config = config

    def __call__(self, blocks: Sequence[nn.Module]) -> None:
        """Let these blocks of one shape, which follow one another, share their weights."""
        everywhere = self.config.layers == "all"
        first, *others = parts = [block.get_submodule(self.part) for block in (blocks if everywhere else blocks[1:-1])]
        if not others:
            which = "layers" if everywhere else "interior layers"
            raise BraidError(f"share: at least 2 {which} are needed, and there are {len(parts)}")
        if self.config.lora is not None:
            for part in parts:
                _add_low_rank(part, self.config.lora)
        for other in others:
            self._share(other, first)

    def _share(self, own: nn.Module, first: nn.Module) -> None:
        if isinstance(own, LowRank) or (isinstance(own, TopKRouter) and not self.shares_routers):
            return
        for name, parameter in first.named_parameters(recurse=False):
            # While transformers 4 opens a folder, setting an attribute would make another parameter of it.
            own._parameters[name] = parameter
        for name, child in own.named_children():
            self._share(child, first.get_submodule(name))


@sharings.register("feeds")
class SharedFeeds(Sharing):
    """One feed-forward part for all layers (MobiLlama); norms stay apart, and so do the routers of experts."""

    part = "feed"


@sharings.register("attentions")
class SharedAttentions(Sharing):
    """One attention for all layers; norms stay apart, and so do the routers of experts."""

    part = "attention"


@sharings.register("blocks")
class SharedBlocks(Sharing):
    """One block for all layers, with its norms and the routers of its experts (ALBERT)."""

    shares_routers = True


class LowRank(nn.Module):
    """The product of two narrow matrices, which begins at zero: what one layer adds to a matrix that several share."""

    def __init__(self, inputs: int, outputs: int, rank: int, stack: int | None = None):
        super().__init__()
        self.down, self.up = linear(stack, inputs, rank), linear(stack, rank, outputs)
        self.down.fill, self.up.fill = fill_like_torch, fill_zeros  # type: ignore[assignment]

    def forward(self, x: Tensor, groups: Groups | None = None, *columns: slice) -> Tensor:
        inner = apply_linear(self.down, x, groups)
        return self.up(inner, groups, *columns) if columns else apply_linear(self.up, inner, groups)


class LowRankLinear(nn.Linear):
    """A linear layer, whose weight may be shared, with a low-rank addition of its own."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora = LowRank(base.in_features, base.out_features, rank)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) + self.lora(input)


class LowRankStackedLinear(StackedLinear):
    """A stack of linear layers, whose weights may be shared; each member has a low-rank addition of its own."""

    def __init__(self, base: StackedLinear, rank: int):
        _, inputs, outputs = base.weight.shape
        super().__init__(base.stack, inputs, outputs, base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.lora = LowRank(inputs, outputs, rank, base.stack)
        for layer in (self, self.lora.down, self.lora.up):
            layer.active_share, layer.product_share = base.active_share, base.product_share  # type: ignore[assignment]
        if base.product_share != base.active_share:
            # Queries of some tokens and keys of all are two calls, each of which reads `down`.
            self.lora.down.product_share = 1 + base.active_share  # type: ignore[assignment]

    def forward(self, x: Tensor, groups: Groups | None = None, columns: slice = slice(None)) -> Tensor:
        return super().forward(x, groups, columns) + self.lora(x, groups, columns)


def _add_low_rank(part: nn.Module, rank: int) -> None:
    """Give every matrix of a part, but for those of routers, a low-rank addition."""
    for name, child in list(part.named_children()):
        if type(child) is nn.Linear:
            setattr(part, name, LowRankLinear(child, rank))
        elif type(child) is StackedLinear:
            setattr(part, name, LowRankStackedLinear(child, rank))
        else:
            _add_low_rank(child, rank)


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
