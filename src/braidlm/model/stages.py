"""Stages: an architecture is a list of them. The first kind is a stack of blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .block import Block, BlockConfig
from .config.ranges import Layers
from .config.registry import Choice, Registry, inherit
from .config.strict import PartOf
from .routing.router import TopKRouter
from .routing.routing import Routings
from .span import Span

stage_kinds = Registry("stage", third_party=True)
sharings = Registry("sharing", third_party=True)


class Stage(nn.Module):
    """The base class: `forward` takes a stream and returns a stream of `width_out` and routings.

    By default it runs `layers` in order.
    """

    width_out: int
    layers: nn.ModuleList
    names: tuple[str, ...] = ()
    """Of its paths, if it has any."""
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
