"""Projections with experts: each token is taken to another width by its own few of several projections (MoEP)."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from .dispatch import ExpertLinear, Groups, dispatch
from .errors import BraidError
from .router import RouterConfig, TopKRouter
from .routing import Routings
from .stacked import carrier


@dataclass
class ExpertsConfig:
    """A bank of experts and its router."""

    names: list[str]
    """One for each expert; `experts: 4` names them expert_1 to expert_4."""
    kind: Literal["linear", "swiglu"] = "linear"
    """What an expert is: one matrix, or a Swish-gated unit."""
    hidden: int | None = None
    """Inner size of a gated expert; by default 4 x the width that comes out."""
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        if not self.names:
            raise BraidError("at least one expert is needed")
        if len(set(self.names)) < len(self.names):
            raise BraidError(f"a name is given twice: {', '.join(self.names)}")
        if self.router.top_k > len(self.names):
            raise BraidError(f"top_k is {self.router.top_k}, and there are only {len(self.names)} experts")

    @classmethod
    def from_shorthand(cls, count: Any) -> dict[str, Any]:
        if isinstance(count, bool) or not isinstance(count, int):
            raise BraidError(f"expected a number of experts or a mapping, got '{count}'")
        return {"names": expert_names(count)}


def expert_names(count: int) -> list[str]:
    """Names for so many experts."""
    return [f"expert_{number + 1}" for number in range(count)]


class ExpertProjection(nn.Module):
    """Computed for the chosen experts only."""

    def __init__(self, config: ExpertsConfig, width: int, to: int, bias: bool):
        super().__init__()
        count, top_k = len(config.names), config.router.top_k
        self.router = TopKRouter(config.router, width, config.names)
        if config.kind == "linear":
            self.out = carrier(ExpertLinear(count, width, to, top_k, bias))
            self.gate_up = None
        else:
            hidden = config.hidden or 4 * to
            self.gate_up = ExpertLinear(count, width, 2 * hidden, top_k, bias)
            self.out = carrier(ExpertLinear(count, hidden, to, top_k, bias))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Routings]:
        routing = self.router(hidden)
        rows = hidden.flatten(0, -2)
        chosen, weights = routing.chosen_BTK.flatten(0, -2), routing.weights_BTK.flatten(0, -2)
        made = dispatch(rows, chosen, weights, len(self.router.choices), self.bank)
        return made.view(*hidden.shape[:-1], -1), (routing,)

    def bank(self, rows: Tensor, groups: Groups) -> Tensor:
        """What the experts make of rows sorted by expert."""
        if self.gate_up is None:
            return self.out(rows, groups)
        gate, up = self.gate_up(rows, groups).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up, groups)
