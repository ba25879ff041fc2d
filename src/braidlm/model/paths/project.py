"""Project: a linear change of the stream's width, by one layer or by experts (MoEP)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Size
from ..dropout import Dropout
from ..routing.dispatch import Groups, Permutation
from ..routing.router import ExpertsConfig, RoutedExperts, TopKRouter, set_active_share
from ..routing.routing import Routings
from ..routing.stacked import StackedLinear, apply_linear, without_residual
from ..span import Span
from ..stages import Stage, stage_kinds


@dataclass
class ProjectionExpertsConfig(ExpertsConfig):
    """A bank of projections and its router."""

    kind: Literal["linear", "swiglu"] = "linear"
    """Whether an expert is one matrix or a Swish-gated unit."""
    hidden: Size | None = None
    """Inner size of a gated expert; by default 4 x the output width."""


class ExpertProjection(RoutedExperts, nn.Module):
    """The weighted sum of the projections that the router chose for each token."""

    def __init__(self, config: ProjectionExpertsConfig, width: int, to: int, bias: bool):
        super().__init__()
        self.config, names, self.compute = config, config.expert_names, config.router.compute
        self.router, self.drop_output = TopKRouter(config.router, width, names), Dropout()
        self.gate_up: nn.Module | None = None
        hidden = width
        if config.kind == "swiglu":
            hidden = config.hidden or 4 * to
            self.gate_up = StackedLinear(len(names), width, 2 * hidden, bias)
            set_active_share(self.gate_up, config.active_share)
        self.out = without_residual(StackedLinear(len(names), hidden, to, bias))
        set_active_share(self.out, config.active_share)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routings]:
        routing = self.router(hidden)
        return self.mixed(hidden, routing), (routing,)

    def expert_rows(self, normed: Tensor, permutation: Permutation, *others: Any) -> Tensor:
        return self._bank(permutation.gather(normed.flatten(0, -2)), permutation.groups)

    def expert_outputs(self, normed: Tensor, *others: Any) -> Tensor:
        return self._bank(normed[None])

    def _bank(self, rows: Tensor, groups: Groups | None = None) -> Tensor:
        """Run the experts on rows sorted by expert, or every expert on every row [1, batch, time, width]."""
        if self.gate_up is not None:
            gate, up = apply_linear(self.gate_up, rows, groups).chunk(2, dim=-1)
            rows = F.silu(gate) * up
        return apply_linear(self.out, rows, groups)


@stage_kinds.register("project")
class ProjectStage(Stage):
    """A linear layer to another width, or with `experts` several, of which a router chooses for each token (MoEP)."""

    @dataclass
    class Config:
        to: Size
        """Output width."""
        bias: bool = False
        """Whether the layer, or each expert, has a bias."""
        experts: ProjectionExpertsConfig | None = None
        """The number of experts, or their names, kind and router; by default none: one layer for all tokens."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.config, self.width_out = config, config.to
        self.linear: nn.Linear | None = None
        self.experts: ExpertProjection | None = None
        if config.experts is None:
            self.linear = without_residual(nn.Linear(width, config.to, bias=config.bias))
        else:
            self.experts = ExpertProjection(config.experts, width, config.to, config.bias)

    def paths_and_joins(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [], [self]

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        if self.experts is not None:
            return self.experts(hidden)
        assert self.linear is not None
        return self.linear(hidden), ()
