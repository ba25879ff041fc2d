"""Joins: how parallel paths become one stream again."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from ..config.registry import Choice, Registry
from ..config.strict import PartOf
from ..errors import BraidError
from ..norms import norms
from ..routing.routing import Routings
from ..routing.stacked import without_residual
from ..span import Span

joins = Registry("join", third_party=True)


@dataclass
class JoinConfig:
    """The options of every join."""

    residual: bool = False
    """Whether the layer's input is added to the join's output."""
    norm: Annotated[Choice, PartOf(norms)] | None = None
    """A normalisation of each path's output before the join; by default none."""


@dataclass(frozen=True)
class JoinShape:
    """The names and sizes of what a join connects."""

    names: tuple[str, ...]
    """Names of the paths."""
    widths: tuple[int, ...]
    """Widths of the paths' outputs."""
    width_in: int
    """Width of the stream into the layer."""
    width_out: int
    """Width of the stream out of the layer."""


class Join(nn.Module):
    """The base class: `join` takes the paths' outputs and their input stream, and returns one stream and routings."""

    Config: Any = JoinConfig
    keeps_paths_separate = False
    """Whether a path reads only its own slice of the stream in the next layer."""
    chooses_paths = False
    """Whether it has a router that chooses among the paths before they are computed."""

    def __init__(self, config: Any, shape: JoinShape):
        super().__init__()
        self.config, self.names, self.width_out = config, shape.names, shape.width_out
        self.address = ""
        """The module name of this join, set by the model."""
        self.inactive: frozenset[str] = frozenset()
        """Names of inactive paths, which add nothing to the output."""
        self.residual = config.residual
        if config.residual and shape.width_in != shape.width_out:
            raise BraidError(
                f"a residual around the join needs equal widths, and here {shape.width_in} becomes {shape.width_out}; "
                "leave out `to` and put a project stage after the parallel one"
            )
        self.norms = None
        if config.norm is not None:
            self.norms = nn.ModuleList(norms.build(config.norm, width) for width in shape.widths)

    def forward(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        if self.norms is not None:
            outputs = [norm(x).to(x.dtype) for norm, x in zip(self.norms, outputs, strict=True)]
        joined, routings = self.join(outputs, stream)
        return (stream + joined if self.residual else joined), routings

    def run(self, layer: Any, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        """The paths of a layer, joined."""
        outputs, routings = layer.outputs(hidden, span)
        joined, own = self(outputs, hidden)
        return joined, routings + own

    def set_costs(self, layer: Any) -> None:
        """Say which share of a layer's paths is active for a token; by default all."""

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        raise NotImplementedError("each join implements this")

    def active(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs, with zeros for inactive paths."""
        if not self.inactive:
            return outputs
        pairs = zip(self.names, outputs, strict=True)
        return [torch.zeros_like(x) if name in self.inactive else x for name, x in pairs]


@joins.register("shared_linear")
class SharedLinear(Join):
    """One linear layer reads the concatenated outputs of all paths (PaPaformer's best)."""

    @dataclass
    class Config(JoinConfig):
        bias: bool = False
        """Whether the layer has a bias."""

    def __init__(self, config: Config, shape: JoinShape):
        super().__init__(config, shape)
        self.linear = without_residual(nn.Linear(sum(shape.widths), shape.width_out, bias=config.bias))

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        return self.linear(torch.cat(self.active(outputs), dim=-1)), ()


@joins.register("concat")
class Concat(Join):
    """Concatenation: each path reads its own slice in the next layer, so that paths never mix inside the stage."""

    keeps_paths_separate = True

    def __init__(self, config: JoinConfig, shape: JoinShape):
        super().__init__(config, shape)
        if shape.width_out != sum(shape.widths):
            raise BraidError(
                f"widths do not add up: the paths have {' + '.join(map(str, shape.widths))} = {sum(shape.widths)} "
                f"and concat must give {shape.width_out}"
            )

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        return torch.cat(self.active(outputs), dim=-1), ()


class SameWidthJoin(Join):
    """A base class for joins that first project the paths' outputs to the width of the stream."""

    def __init__(self, config: Any, shape: JoinShape):
        super().__init__(config, shape)
        self.leave = nn.ModuleDict(
            {
                name: without_residual(nn.Linear(width, shape.width_in, bias=False))
                for name, width in zip(shape.names, shape.widths, strict=True)
                if width != shape.width_in
            }
        )
        projects = shape.width_out != shape.width_in
        self.out = without_residual(nn.Linear(shape.width_in, shape.width_out, bias=False)) if projects else None

    def to_stream_width(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs, projected where their width differs from the stream's."""
        return [self.leave[name](x) if name in self.leave else x for name, x in zip(self.names, outputs, strict=True)]

    def to_width_out(self, joined: Tensor) -> Tensor:
        return joined if self.out is None else self.out(joined)


@joins.register("add")
class Add(SameWidthJoin):
    """The change that each path makes is added to the stream, which itself is added once."""

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        pairs = zip(self.names, self.to_stream_width(outputs), strict=True)
        active = {name: x for name, x in pairs if name not in self.inactive}
        # A path of the stream's width returns stream + change; a projected or normalised output is a change alone.
        streams = 0 if self.norms is not None else sum(name not in self.leave for name in active)
        return self.to_width_out(sum(active.values(), start=(1 - streams) * stream)), ()
