"""Project: a linear change of the stream's width, for all tokens alike or by experts."""

from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import BraidError
from ..routing.routing import Routings
from ..routing.stacked import without_residual
from ..span import Span
from ..stages import Stage, stage_kinds
from .expert_projection import ExpertProjection, ProjectionExpertsConfig


@stage_kinds.register("project")
class ProjectStage(Stage):
    """One linear layer to another width, or with `experts` a few of several for each token (MoEP)."""

    @dataclass
    class Config:
        to: int
        """The width that comes out."""
        bias: bool = False
        """Whether the layer, or each expert, has a bias."""
        experts: ProjectionExpertsConfig | None = None
        """How many experts, or their names, kind and router; by default none: one layer for all tokens."""

        def __post_init__(self) -> None:
            if self.to < 1:
                raise BraidError(f"to must be at least 1, got {self.to}")

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config, self.width_out = config, config.to
        self.linear: nn.Linear | None = None
        self.experts: ExpertProjection | None = None
        if config.experts is None:
            self.linear = without_residual(nn.Linear(width, config.to, bias=config.bias))
        else:
            self.experts = ExpertProjection(config.experts, width, config.to, config.bias)

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        if self.experts is not None:
            return self.experts(hidden)
        assert self.linear is not None
        return self.linear(hidden), ()
