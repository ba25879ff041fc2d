"""A norm for each path: the parts of a stream whose paths stay apart up to the head are normalised one by one."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from ..config.ranges import Size
from ..config.registry import Choice
from ..config.strict import PartOf
from ..errors import BraidError
from ..norms import norms
from .parallel import PathConfig


@dataclass
class PathNormConfig:
    """The norm of one path; a number is its width."""

    width: Size
    """Channels of its part of the stream."""
    norm: Annotated[Choice, PartOf(norms, "rms")] = "rms"  # type: ignore[assignment]
    """Its kind."""

    @classmethod
    def from_shorthand(cls, width: Any) -> dict[str, Any]:
        return {"width": width}


@norms.register("per_path")
class PerPathNorm(nn.Module):
    """A norm of its own for each path's part of the stream, where paths stay apart up to the head (`average`)."""

    @dataclass
    class Config:
        paths: dict[str, PathNormConfig]
        """The width of each path by its name, in the order of their parts, or {width, norm}."""

        def __post_init__(self) -> None:
            for name in self.paths:
                PathConfig(name=name)  # checks it

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config = config
        self.widths = [path.width for path in config.paths.values()]
        check_parts(self.widths, width)
        self.paths = nn.ModuleDict({name: norms.build(path.norm, path.width) for name, path in config.paths.items()})

    def forward(self, hidden: Tensor) -> Tensor:
        parts = zip(self.paths.values(), hidden.split(self.widths, dim=-1), strict=True)
        return torch.cat([norm(part) for norm, part in parts], dim=-1)

    def paths_and_joins(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [self], []


def check_parts(widths: list[int], width: int) -> None:
    """The parts of all paths are the whole stream."""
    if sum(widths) != width:
        parts = " + ".join(map(str, widths)) or "none"
        raise BraidError(f"widths do not add up: the paths have {parts} = {sum(widths)} and the stream has {width}")
