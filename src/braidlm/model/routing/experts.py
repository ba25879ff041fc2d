"""A bank of experts: named modules of one shape, of which a router chooses a few for each token."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..config.ranges import Choices
from ..config.registry import Choice, Registry
from ..errors import BraidError
from .router import RouterConfig
from .stacked import StackedLinear


@dataclass
class ExpertsConfig:
    """The experts' names and their router."""

    names: list[str] | Choices
    """The names of the experts, or their number: they are then called expert_1, expert_2 and so on."""
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        if isinstance(self.names, int):
            self.names = [f"expert_{number + 1}" for number in range(self.names)]
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
        return {"names": count}

    @property
    def expert_names(self) -> list[str]:
        """The names."""
        assert isinstance(self.names, list)
        return self.names


def set_active_share(bank: nn.Module, share: float) -> None:
    """Set the share of a bank's parameters and products that is active for a token, for the accounting of costs."""
    for module in bank.modules():
        module.active_share = share  # type: ignore[assignment]
        if isinstance(module, StackedLinear):
            module.product_share = share


def check_stackable(registry: Registry, choice: Choice) -> None:
    """Refuse a part that cannot be stacked: experts are computed as a stack."""
    if not getattr(registry[choice.kind], "stackable", False):
        raise BraidError(f"{registry.noun} '{choice.kind}' cannot be one of several experts")
