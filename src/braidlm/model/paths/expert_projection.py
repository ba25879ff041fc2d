"""Projections with experts: each token is taken to another width by its own few of several projections (MoEP)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..routing.compute import is_sparse
from ..routing.dispatch import Groups, dispatch
from ..routing.experts import ExpertsConfig, set_active_share
from ..routing.router import TopKRouter
from ..routing.routing import Routing, Routings
from ..routing.stacked import StackedLinear, apply_linear, without_residual


@dataclass
class ProjectionExpertsConfig(ExpertsConfig):
    """A bank of projections and its router."""

    kind: Literal["linear", "swiglu"] = "linear"
    """What an expert is: one matrix, or a Swish-gated unit."""
    hidden: int | None = None
    """Inner size of a gated expert; by default 4 x the width that comes out."""


class ExpertProjection(nn.Module):
    """Each token's weighted sum of its few projections."""

    def __init__(self, config: ProjectionExpertsConfig, width: int, to: int, bias: bool):
        super().__init__()
        self.config, names, self.compute = config, config.expert_names, config.router.compute
        self.router = TopKRouter(config.router, width, names)
        self.gate_up: nn.Module | None = None
        hidden = width
        if config.kind == "swiglu":
            hidden = config.hidden or 4 * to
            self.gate_up = StackedLinear(len(names), width, 2 * hidden, bias)
            set_active_share(self.gate_up, config.router.top_k / len(names))
        self.out = without_residual(StackedLinear(len(names), hidden, to, bias))
        set_active_share(self.out, config.router.top_k / len(names))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routings]:
        routing = self.router(hidden)
        project = self._sparse if is_sparse(self.compute, hidden) else self._dense
        return project(hidden, routing).view(*hidden.shape[:-1], -1), (routing,)

    def _sparse(self, hidden: Tensor, routing: Routing) -> Tensor:
        chosen, weights = routing.chosen_BTK.flatten(0, -2), routing.weights_BTK.flatten(0, -2)
        return dispatch(hidden.flatten(0, -2), chosen, weights, len(self.router.choices), self.bank)

    def _dense(self, hidden: Tensor, routing: Routing) -> Tensor:
        made = self.bank(hidden.flatten(0, -2)[None])
        return torch.einsum("etw,te->tw", made, routing.weights_BTN.flatten(0, -2).to(made.dtype))

    def bank(self, rows: Tensor, groups: Groups | None = None) -> Tensor:
        """What the experts make of rows sorted by expert, or every expert of every row [1, row, width]."""
        if self.gate_up is None:
            return apply_linear(self.out, rows, groups)
        gate, up = apply_linear(self.gate_up, rows, groups).chunk(2, dim=-1)
        return apply_linear(self.out, F.silu(gate) * up, groups)
