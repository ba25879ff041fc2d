"""Project: a linear change of the stream's width, by one layer or by experts (MoEP)."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Size
from ..config.registry import NoOptions, Registry
from ..dropout import Dropout
from ..routing.dispatch import Groups, Permutation
from ..routing.router import ExpertsConfig, RoutedExperts, TopKRouter, set_active_share
from ..routing.routing import Routings
from ..routing.stacked import StackedLinear, apply_linear, without_residual
from ..span import Span
from ..stages import Stage, stage_kinds

projections = Registry("projection", third_party=True)  # the kinds of experts that change the stream's width


@dataclass
class ProjectionExpertsConfig(ExpertsConfig):
    """A bank of projections and its router."""

    kind: str = "linear"
    """The kind of expert: `linear`, one matrix, `swiglu`, a Swish-gated unit, or another registered one."""
    hidden: Size | None = None
    """Inner size of a gated expert; by default 4 x the output width."""

    def __post_init__(self) -> None:
        super().__post_init__()
        projections[self.kind]  # an unknown one is refused


class ExpertProjection(RoutedExperts, nn.Module):
    """The weighted sum of the projections that the router chose for each token; each kind has a bank of its own."""

    Config = NoOptions

    def __init__(self, config: ProjectionExpertsConfig, width: int, to: int, bias: bool):
        super().__init__()
        self.config, self.compute = config, config.router.compute
        self.router, self.drop_output = TopKRouter(config.router, width, config.expert_names), Dropout()
        self.make_bank(width, to, bias)

    def make_bank(self, width: int, to: int, bias: bool) -> None:
        """Make the parameters of all experts, by `stack`."""
        raise NotImplementedError("abstract: each kind has its own")

    def bank(self, rows: Tensor, groups: Groups | None = None) -> Tensor:
        """Run the experts on rows sorted by expert, or every expert on every row [1, batch, time, width]."""
        raise NotImplementedError("abstract: each kind has its own")

    def stack(self, inputs: int, outputs: int, bias: bool) -> StackedLinear:
        """A matrix for each expert."""
        layer = StackedLinear(len(self.config.expert_names), inputs, outputs, bias)
        set_active_share(layer, self.config.active_share)
        return layer

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routings]:
        routing = self.router(hidden)
        return self.mixed(hidden, routing), (routing,)

    def expert_rows(self, normed: Tensor, permutation: Permutation, *others: Any) -> Tensor:
        return self.bank(permutation.gather(normed.flatten(0, -2)), permutation.groups)

    def expert_outputs(self, normed: Tensor, *others: Any) -> Tensor:
        return self.bank(normed[None])


@projections.register("linear")
class LinearProjections(ExpertProjection):
    """One matrix for each expert."""

    def make_bank(self, width: int, to: int, bias: bool) -> None:
        self.out = without_residual(self.stack(width, to, bias))

    def bank(self, rows: Tensor, groups: Groups | None = None) -> Tensor:
        return apply_linear(self.out, rows, groups)


@projections.register("swiglu")
class SwiGLUProjections(ExpertProjection):
    """A Swish-gated unit for each expert."""

    def make_bank(self, width: int, to: int, bias: bool) -> None:
        hidden = self.config.hidden or 4 * to
        self.gate_up = self.stack(width, 2 * hidden, bias)
        self.out = without_residual(self.stack(hidden, to, bias))

    def bank(self, rows: Tensor, groups: Groups | None = None) -> Tensor:
        gate, up = apply_linear(self.gate_up, rows, groups).chunk(2, dim=-1)
        return apply_linear(self.out, F.silu(gate) * up, groups)


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
            self.experts = projections[config.experts.kind](config.experts, width, config.to, config.bias)

    def paths_and_joins(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [], [self]

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        if self.experts is not None:
            return self.experts(hidden)
        assert self.linear is not None
        return self.linear(hidden), ()
