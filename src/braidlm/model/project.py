"""Project: a linear change of the stream's width."""

from dataclasses import dataclass

from torch import Tensor, nn

from .errors import BraidError
from .routing import Routings
from .span import Span
from .stacked import carrier
from .stages import Stage, stage_kinds


@stage_kinds.register("project")
class ProjectStage(Stage):
    """One linear layer to another width."""

    @dataclass
    class Config:
        to: int
        """The width that comes out."""
        bias: bool = False
        """Whether the layer has a bias."""

        def __post_init__(self) -> None:
            if self.to < 1:
                raise BraidError(f"to must be at least 1, got {self.to}")

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.linear = carrier(nn.Linear(width, config.to, bias=config.bias))
        self.width_out = config.to

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        return self.linear(hidden), ()
