"""A norm for each path: the parts of a stream whose paths stay apart up to the head are normalised one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from ..config.ranges import Size
from ..config.registry import Choice
from ..config.strict import PartOf
from ..errors import BraidError
from ..norms import norms
from .parallel import PathConfig


@dataclass
class PathPart:
    """One path's part of the stream."""

    name: str
    """Name of the path."""
    width: Size
    """Its channels."""

    def __post_init__(self) -> None:
        PathConfig(name=self.name)  # checks it


@dataclass
class PathNorm(PathPart):
    """The norm of one path."""

    norm: Annotated[Choice, PartOf(norms, "rms")] = "rms"  # type: ignore[assignment]
    """Its kind."""


@norms.register("per_path")
class PerPathNorm(nn.Module):
    """A norm of its own for each path's part of the stream, where paths stay apart up to the head (`average`)."""

    @dataclass
    class Config:
        paths: list[PathNorm]
        """The paths in the order of their parts of the stream: {name, width, norm}."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config = config
        self.widths = widths_of(config.paths, width)
        self.paths = nn.ModuleDict({path.name: norms.build(path.norm, path.width) for path in config.paths})

    def forward(self, hidden: Tensor) -> Tensor:
        parts = zip(self.paths.values(), hidden.split(self.widths, dim=-1), strict=True)
        return torch.cat([norm(part) for norm, part in parts], dim=-1)

    def paths_and_joins(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [self], []


def widths_of(paths: Sequence[PathPart], width: int) -> list[int]:
    """The widths of all parts, which must have names of their own and be the whole stream."""
    if len({path.name for path in paths}) < len(paths):
        raise BraidError("paths: a name is listed twice")
    widths = [path.width for path in paths]
    if sum(widths) != width:
        parts = " + ".join(map(str, widths)) or "none"
        raise BraidError(f"widths do not add up: the paths have {parts} = {sum(widths)} and the stream has {width}")
    return widths
