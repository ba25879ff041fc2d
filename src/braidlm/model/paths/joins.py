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

joins = Registry("join", third_party=True)


@dataclass
class JoinConfig:
    """What every join has."""

    residual: bool = False
    """Whether what came into the layer is added to what the join makes."""
    norm: Annotated[Choice, PartOf(norms)] | None = None
    """A normalisation of each path's output before the join; by default none."""


@dataclass(frozen=True)
class JoinShape:
    """What a join connects."""

    names: tuple[str, ...]
    """Of the paths."""
    widths: tuple[int, ...]
    """Of the paths' outputs."""
    width_in: int
    """Of the stream that came into the layer."""
    width_out: int
    """Of the stream that is wanted."""


class Join(nn.Module):
    """The contract: outputs of the paths and the stream they read in, one stream of `width_out` and routings out."""

    Config: Any = JoinConfig
    keeps_paths_separate = False
    """Whether a path reads only its own part of the stream in the next layer."""

    def __init__(self, config: Any, shape: JoinShape):
        super().__init__()
        self.config, self.names, self.width_out = config, shape.names, shape.width_out
        self.address = ""
        """The model's name for this join; the model sets it."""
        self.inactive: frozenset[str] = frozenset()
        """Paths that add nothing."""
        self.residual = config.residual
        if config.residual and shape.width_in != shape.width_out:
            raise BraidError(
                f"a residual around the join needs one width, and here {shape.width_in} becomes {shape.width_out}; "
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

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        raise NotImplementedError("abstract: each join has its own way")

    def active(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs, with zeros for inactive paths."""
        if not self.inactive:
            return outputs
        pairs = zip(self.names, outputs, strict=True)
        return [torch.zeros_like(x) if name in self.inactive else x for name, x in pairs]


@joins.register("shared_linear")
class SharedLinear(Join):
    """One linear layer reads all paths side by side (PaPaformer's best)."""

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
    """Side by side and nothing more: each path reads its own part again, so paths never mix inside the stage."""

    keeps_paths_separate = True

    def __init__(self, config: JoinConfig, shape: JoinShape):
        super().__init__(config, shape)
        if shape.width_out != sum(shape.widths):
            raise BraidError(
                f"widths do not add up: the paths have {' + '.join(map(str, shape.widths))} = {sum(shape.widths)} "
                f"and concat is to give {shape.width_out}"
            )

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        return torch.cat(self.active(outputs), dim=-1), ()


class SameWidthJoin(Join):
    """A join that takes paths one for another: outputs of other widths than the stream's are projected to it first."""

    def __init__(self, config: Any, shape: JoinShape):
        super().__init__(config, shape)
        self.leave = nn.ModuleDict(
            {
                name: without_residual(nn.Linear(width, shape.width_in, bias=False))
                for name, width in zip(shape.names, shape.widths, strict=True)
                if width != shape.width_in
            }
        )
        grows = shape.width_out != shape.width_in
        self.out = without_residual(nn.Linear(shape.width_in, shape.width_out, bias=False)) if grows else None

    def to_stream_width(self, outputs: list[Tensor]) -> list[Tensor]:
        """Every output at the stream's width."""
        return [self.leave[name](x) if name in self.leave else x for name, x in zip(self.names, outputs, strict=True)]

    def to_width_out(self, joined: Tensor) -> Tensor:
        return joined if self.out is None else self.out(joined)


@joins.register("add")
class Add(SameWidthJoin):
    """What each path changes is added to the stream, which itself counts once."""

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        pairs = zip(self.names, self.to_stream_width(outputs), strict=True)
        active = {name: x for name, x in pairs if name not in self.inactive}
        # A path of the stream's width gives the stream and its change; one that was projected or normalised, a change.
        carried = 0 if self.norms is not None else sum(name not in self.leave for name in active)
        return self.to_width_out(sum(active.values(), start=(1 - carried) * stream)), ()
