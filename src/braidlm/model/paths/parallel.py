"""Parallel: layers of named paths, joined into one stream after each layer."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..config.ranges import MAX_ITEMS, Choices, Layers, Size
from ..config.registry import Choice, inherit
from ..config.strict import PartOf, decode
from ..errors import BraidError
from ..routing.dispatch import Compute
from ..routing.router import TopKRouter
from ..routing.routing import Routings
from ..routing.stacked import StackedLinear, has_hooks, is_stack, one_member, without_residual
from ..span import Span
from ..stages import Block, BlockConfig, Stage, can_stack, share_weights, sharings, stage_kinds
from .joins import JoinShape, joins

BLOCK_OPTIONS = {field.name for field in fields(BlockConfig)}


@dataclass
class PathConfig(BlockConfig):
    """The name of a path and the options of its blocks."""

    name: str = ""
    """Name of the path."""
    width: Size | None = None
    """Channels of its blocks; by default the stream's, or with concat an equal slice of it."""
    depth: Layers | None = None
    """Number of blocks; by default one per layer."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "_").isidentifier():
            raise BraidError(
                f"a path's name is made of letters, digits, - and _, and does not begin with a digit, got '{self.name}'"
            )
        if hasattr(nn.ModuleDict, self.name):
            raise BraidError(f"a path cannot be called '{self.name}': torch reserves that name")


def blocks_in_layer(depth: int, layers: int, layer: int) -> range:
    """The indices of a path's `depth` blocks that belong to one of `layers` layers, evenly spread and in order."""
    return range(layer * depth // layers, (layer + 1) * depth // layers)


@dataclass(frozen=True)
class Settling:
    """Paths that are read together at the beginning of a text, and of which one then goes on alone."""

    after: int  # how many tokens
    paths: int

    def saves(self, time: int) -> bool:
        """Whether the beginning by all, and then the whole text by one, is less than the whole by all."""
        return time * (self.paths - 1) > (self.after - 1) * self.paths


@stage_kinds.register("parallel")
class ParallelStage(Stage):
    """Layers of parallel paths. Paths of one shape are computed as a stack, others one by one."""

    @dataclass
    class Config:
        other_keys: ClassVar = tuple(sorted(BLOCK_OPTIONS))
        """What the paths inherit."""
        paths: list[PathConfig]
        """Names, or names with options; by default these are the stage's, then those of the model's `block`."""
        layers: Layers = 1
        """Number of layers, each of which runs the paths in parallel and joins them."""
        join: Annotated[Choice, PartOf(joins, "shared_linear")] = "shared_linear"  # type: ignore[assignment]
        """How the paths become one stream after each layer."""
        to: Size | None = None
        """Width after the last layer; by default that of the stage's input (concat: the sum of the paths' widths)."""
        stacked: bool | Literal["with_experts"] = True
        """Whether paths of one shape are computed as a stack: those without experts (true), or also those with experts,
        unless a router chooses among the paths too (with_experts). False keeps a module for each path, the plain
        reference."""
        share: Annotated[Choice, PartOf(sharings)] | None = None
        """What the blocks of a path share: `feeds`, `attentions` or `blocks`; by default each has its own weights."""

        def __post_init__(self) -> None:
            if not self.paths:
                raise BraidError("paths: at least one is needed")
            counts = Counter(path.name for path in self.paths)
            for twice in sorted(name for name, count in counts.items() if count > 1):
                raise BraidError(f"paths: '{twice}' is listed twice")

    @classmethod
    def inherit(cls, options: dict[str, Any], template: dict[str, Any]) -> dict[str, Any]:
        """Add to each path the block options of the stage and the model that it does not set itself."""
        own = {key: value for key, value in options.items() if key in BLOCK_OPTIONS}
        shared = inherit(template, own)
        rest = {key: value for key, value in options.items() if key not in BLOCK_OPTIONS}
        if "paths" in rest:
            rest["paths"] = _inherited_paths(rest["paths"], shared)
        return rest

    settling: Settling | None = None  # whether one of its paths is computed alone after the beginning of a text

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config = config
        paths = _sized(config, width)
        self.names, self.join_kind = tuple(path.name for path in config.paths), config.join.kind
        last = config.layers - 1
        self.layers = nn.ModuleList()
        if getattr(config.join.options, "per", None) == "sublayer":
            block = joins[config.join.kind].experts_for_paths(config, paths, width)
            self.layers.extend(Block(block, width) for _ in range(config.layers))
            self.width_out = width
            share_weights(config.share, [list(self.layers)])
            return
        for index in range(config.layers):
            layer = ParallelLayer(config, paths, index, width, config.to if index == last else None)
            width = layer.width_out
            self.layers.append(layer)
        self.width_out = width
        layers: Any = self.layers
        rows = [(layer.stack,) if layer.stack is not None else tuple(layer.paths.values()) for layer in layers]
        share_weights(config.share, ([block for some in row for block in some] for row in zip(*rows, strict=True)))

    def use_paths(self, active: frozenset[str]) -> None:
        """An inactive path adds nothing to the output of its join."""
        for layer in self._joined_layers():
            layer.join.inactive = frozenset(layer.names) - active
        for router in self.path_routers():
            router.inactive = frozenset(self.names) - active

    def path_routers(self) -> Iterator[TopKRouter]:
        for layer in self._joined_layers():
            yield from (module for module in layer.join.modules() if isinstance(module, TopKRouter))
        for block in self._routed_blocks():
            yield from (block.attention.router, block.feed.router)

    def paths_and_joins(self) -> tuple[list[nn.Module], list[nn.Module]]:
        paths = [part for layer in self._joined_layers() for part in (layer.stack, layer.paths)]
        joining = [part for layer in self._joined_layers() for part in (layer.enter, layer.join)]
        for block in self._routed_blocks():
            paths += [block.attention.bank, block.feed.bank]
            joining += [block.attention.router, block.feed.router, block.attention_norm, block.feed_norm]
        return [part for part in paths if part is not None], [part for part in joining if part is not None]

    def _joined_layers(self) -> list["ParallelLayer"]:
        return [layer for layer in self.layers if isinstance(layer, ParallelLayer)]

    def _routed_blocks(self) -> list[Any]:
        """Its blocks whose attention experts and feed-forward experts are the paths."""
        return [layer for layer in self.layers if isinstance(layer, Block)]


class ParallelLayer(nn.Module):
    """The blocks of each path in one layer, and their join."""

    def __init__(self, config: ParallelStage.Config, paths: list[Any], index: int, width: int, to: int | None):
        super().__init__()
        self.config = config
        counts = [len(blocks_in_layer(path.depth, config.layers, index)) for path in paths]
        self.names = tuple(path.name for path in paths)
        self.widths = tuple(path.width for path in paths)
        join_kind = joins[config.join.kind]
        self.reads_own_slice = join_kind.keeps_paths_separate and width == sum(self.widths)
        sizes = {n: w for n, w in zip(self.names, self.widths, strict=True) if w != width and not self.reads_own_slice}
        self.stack: nn.ModuleList | None = None
        self.paths: nn.ModuleDict | None = None
        self.enter: nn.Module | None = None
        with_experts = config.stacked == "with_experts" and not join_kind.chooses_paths
        if config.stacked and len(paths) > 1 and of_one_shape(paths, with_experts):
            self.stack = _blocks(paths[0], counts[0], self.names)
            self.enter = without_residual(StackedLinear(len(paths), width, paths[0].width)) if sizes else None
        else:
            self.paths = nn.ModuleDict()
            for path, count in zip(paths, counts, strict=True):
                self.paths[path.name] = _blocks(path, count)
            self.enter = nn.ModuleDict(
                {name: without_residual(nn.Linear(width, size, bias=False)) for name, size in sizes.items()}
            )
        default_width = sum(self.widths) if join_kind.keeps_paths_separate else width
        self.join = joins.build(config.join, JoinShape(self.names, self.widths, width, to or default_width))
        self.width_out: int = self.join.width_out
        self.compute: Compute = getattr(config.join.options, "compute", "dense")
        self.join.set_costs(self)

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        return self.join.run(self, hidden, span)  # type: ignore[no-any-return]

    def asked_for(self, span: Span) -> tuple[str, ...]:
        """The paths that are computed: all of them, unless others are inactive, or read by nobody, and may be left out.
        A cache has a place for every path's keys, and training a gradient for every path's weights."""
        asked = tuple(n for n in self.names if n not in self.join.inactive and (span.paths is None or n in span.paths))
        kept = self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or span.cache is not None
        if len(asked) == len(self.names) or kept or span.needs_weights or span.present is not None:
            return self.names
        return asked if self.can_leave_out else self.names

    @property
    def can_leave_out(self) -> bool:
        """Whether some paths can be computed alone: routings are those of all, and sharded weights are gathered in one
        order everywhere."""
        if self.stack is not None:
            parts = [part for part in (self.stack, self.enter) if part is not None]
            return all(is_stack(part, len(self.names)) for part in parts)
        assert self.paths is not None
        return not any(hasattr(part, "address") or has_hooks(part) for part in self.paths.modules())

    def outputs(self, hidden: Tensor, span: Span, takers: Tensor | None = None) -> tuple[list[Tensor], Routings]:
        """The output of each path, zeros of those that are left out. With `takers` [path, batch, time], routers within
        a path count its takers alone."""
        asked = self.asked_for(span)
        if self.stack is not None and asked == self.names:
            return self._stacked_outputs(hidden, span)
        outputs: list[Tensor] = []
        routings: Routings = ()
        for index, (name, width) in enumerate(zip(self.names, self.widths, strict=True)):
            if name not in asked:
                outputs.append(hidden.new_zeros(*hidden.shape[:-1], width))
            elif self.stack is not None:
                outputs += self._stacked_outputs(hidden, span, index)[0]
            else:
                output, chosen = self._path_output(hidden, span, index, takers)
                outputs.append(output)
                routings += chosen
        return outputs, routings

    def _path_output(self, hidden: Tensor, span: Span, index: int, takers: Tensor | None) -> tuple[Tensor, Routings]:
        """The output of a path that is in no stack."""
        name = self.names[index]
        if self.reads_own_slice:
            hidden = hidden.split(self.widths, dim=-1)[index]
        elif name in self.enter:  # type: ignore[operator]
            hidden = self.enter[name](hidden)  # type: ignore[index, operator]
        span = span if span.present is None else replace(span, present=span.present[index : index + 1])
        routings: Routings = ()
        for block in self.blocks(name):
            hidden, chosen = block(hidden, span)
            routings += chosen
        if takers is not None:
            routings = tuple(replace(routing, present_BT=takers[index]) for routing in routings)
        return hidden, routings

    def blocks(self, name: str) -> Iterator[nn.Module]:
        """The blocks of one path in this layer, where paths are not stacked."""
        assert self.paths is not None
        return self.paths[name].children()

    def _stacked_outputs(self, hidden: Tensor, span: Span, member: int | None = None) -> tuple[list[Tensor], Routings]:
        """The outputs of all members of the stack, or of one of them."""
        stack, enter, members = self.stack, self.enter, slice(None)
        if member is not None:
            assert stack is not None
            stack, members = one_member(stack, member), slice(member, member + 1)
            enter = None if enter is None else one_member(enter, member)
        if self.reads_own_slice:
            stream = torch.stack(hidden.split(self.widths, dim=-1)[members])
        else:
            stream = hidden[None] if enter is None else enter(hidden[None])
        routings: Routings = ()
        for block in stack or ():
            stream, block_routings = block(stream, span)
            routings += block_routings
        return list(stream.expand(len(self.names[members]), *stream.shape[1:]).unbind(0)), routings


def _blocks(path: Any, count: int, members: tuple[str, ...] = ()) -> nn.ModuleList:
    """The blocks of a path, or of a stack of paths like it, in one layer."""
    stack = len(members) or None
    try:
        return nn.ModuleList(Block(path, path.width, stack, members) for _ in range(count))
    except BraidError as error:
        raise BraidError(error.what, f"path '{path.name}'", error.todo) from error


def _sized(config: ParallelStage.Config, width: int) -> list[Any]:
    """The options of the paths, all with a width and a depth."""
    share = width
    if joins[config.join.kind].keeps_paths_separate:
        share, rest = divmod(width, len(config.paths))
        if rest and any(path.width is None for path in config.paths):
            raise BraidError(f"width {width} does not divide into {len(config.paths)} paths; give each a width")
    return [replace(path, width=path.width or share, depth=path.depth or config.layers) for path in config.paths]


def of_one_shape(paths: list[Any], with_experts: bool = False) -> bool:
    """Whether paths differ in their names only, and can be stacked."""
    first = paths[0]
    return can_stack(first, with_experts) and all(replace(path, name=first.name) == first for path in paths)


def _inherited_paths(paths: Any, shared: dict[str, Any]) -> Any:
    """`2`, `[stories, maths]` or `{stories: {width: 64}, maths: }` as a list of paths with all their options."""
    if isinstance(paths, int) and not isinstance(paths, bool):
        paths = [f"path_{number + 1}" for number in range(decode(Choices, paths, "paths"))]
    if isinstance(paths, dict):
        paths = [{"name": name, **(own or {})} if isinstance(own or {}, dict) else own for name, own in paths.items()]
    if not isinstance(paths, list) or len(paths) > MAX_ITEMS:
        return paths  # decoding raises the error
    named = [{"name": path} if isinstance(path, str) else path for path in paths]
    return [inherit(shared, path) if isinstance(path, dict) else path for path in named]
