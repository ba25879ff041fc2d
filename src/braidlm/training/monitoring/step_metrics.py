"""Metrics of steps: loss, gradient norm, and how evenly routers use their choices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn, stack

from braidlm.training.step.parallel import Rank, sum_over_processes
from braidlm.training.step.step import StepReport

HARDLY_USED = 0.05
"""A choice below this share of an even load counts as unused."""
USAGE_PATIENCE = 10
"""Consecutive records with a hardly used choice before the warning, because routers are unsteady at first."""


@dataclass
class StepMetrics:
    """Metrics of the steps since the last record, copied from the device only when they are read."""

    rank: Rank
    losses: list[float] = field(default_factory=list)
    """The losses since the last record; saved with a checkpoint, so that a resumed run records the same mean."""
    norm: float = 0.0
    """The gradient norm of the last step that was read."""
    routing_loss: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    """The recipe's extra losses in the last step that was read, without their weights."""
    usage: dict[str, list[float]] = field(default_factory=dict)
    """For each router, in the last step that was read."""
    unread: list[tuple[int, StepReport]] = field(default_factory=list)

    def add(self, step: int, report: StepReport) -> None:
        """Add the report of a step, which stays on the device."""
        self.unread.append((step, report))

    def read(self) -> str | None:
        """Wait for the device; returns a message about the first step with a value that is not finite, or None."""
        if not self.unread:
            return None
        steps, reports = zip(*self.unread, strict=True)
        self.unread.clear()
        losses = self._summed([report.loss for report in reports])
        routing_losses = self._summed([report.routing_loss for report in reports])
        norms = stack([report.gradient_norm for report in reports]).tolist()
        extra = {name: self._summed([report.extra[name] for report in reports]) for name in reports[0].extra}
        totals = map(sum, zip(losses, routing_losses, *extra.values(), strict=True))
        for step, loss, norm, report in zip(steps, totals, norms, reports, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = "gradient" if math.isfinite(loss) else "loss"
                return f"the {what} became infinite or not a number at step {step}{_router_problem(report)}"
        self.losses += losses
        self.norm, self.routing_loss = norms[-1], routing_losses[-1]
        self.extra = {name: values[-1] for name, values in extra.items()}
        self.usage = {name: share.tolist() for name, share in reports[-1].usage.items()}
        return None

    def _summed(self, shares: list[Tensor]) -> list[float]:
        return sum_over_processes(stack(shares), self.rank).tolist()

    def take_mean(self) -> float:
        """The mean loss since the last call."""
        mean = sum(self.losses) / len(self.losses)
        self.losses = []
        return mean


def _router_problem(report: StepReport) -> str:
    """The first router whose usage is not finite, if there is one."""
    for name, share in report.usage.items():
        if not bool(share.isfinite().all()):
            return f", where router {name} gives scores that are not numbers"
    return ""


def usage_entropy(usage: Sequence[float]) -> float:
    """The entropy of the usage divided by log N: 1 when all choices are used equally, 0 when one has everything."""
    if len(usage) < 2:
        return 1.0
    return -sum(share * math.log(share) for share in usage if share > 0) / math.log(len(usage))


def lowest_usage(usage: Sequence[float]) -> float:
    """The smallest usage relative to an even one: 1 when all are equal, 0 when a choice is never used."""
    return min(usage) * len(usage)


def choices_of(model: nn.Module) -> dict[str, Sequence[str]]:
    """By its address, the names of what each router or join chooses among."""
    choices: dict[str, Sequence[str]] = {}
    for module in model.modules():
        if hasattr(module, "address"):  # a router's or a join's
            names: Any = getattr(module, "choices", None) or getattr(module, "names", ())
            choices[str(module.address)] = names
    return choices


class UsageMonitor:
    """Warns once for each router that hardly uses one of its choices."""

    def __init__(self, choices: Mapping[str, Sequence[str]]) -> None:
        """`choices` are the names of what each router chooses among; a part of another package may tell none."""
        self.choices = choices
        self._records: dict[str, int] = {}
        """Consecutive records, up to the last, in which a choice of the router was hardly used."""
        self._warned: set[str] = set()

    def update(self, usage: Mapping[str, Sequence[float]]) -> str | None:
        """A warning after one more record, for all routers together; None if there is nothing new."""
        unused = []
        for router, shares in usage.items():
            self._records[router] = self._records.get(router, 0) + 1 if lowest_usage(shares) < HARDLY_USED else 0
            if self._records[router] >= USAGE_PATIENCE and router not in self._warned:
                self._warned.add(router)
                names = self.choices.get(router) or [f"choice {number + 1}" for number in range(len(shares))]
                unused.append(f"{router} ({names[shares.index(min(shares))]})")
        if not unused:
            return None
        return (
            f"routers that hardly use one of their choices (below {HARDLY_USED:.0%} of an even share in "
            f"{USAGE_PATIENCE} records in a row): {', '.join(unused)}. Where all are to be used, a larger weight of a "
            "balance loss spreads the tokens, such as `losses: {switch: 0.2}` of the router; what a text does not use "
            "can be pruned"
        )
