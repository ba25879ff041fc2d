"""The loss and gradient norm of every step, read from the device only when someone looks."""

import math
from dataclasses import dataclass, field

from torch import Tensor, stack

from braidlm.training.parallel import Rank, sum_over_processes
from braidlm.training.step import StepReport


@dataclass
class Readings:
    """Numbers of the steps since the last record."""

    rank: Rank
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last record; saved with a checkpoint, so that the next record is the same after it."""
    norm: float = 0.0
    """Of the last step that was read."""
    routing_loss: float = 0.0
    usage: dict[str, list[float]] = field(default_factory=dict)
    """Of the last step that was read, for each router."""
    unread: list[tuple[int, StepReport]] = field(default_factory=list)

    def add(self, step: int, report: StepReport) -> None:
        """Numbers of a step, still on the device."""
        self.unread.append((step, report))

    def read(self) -> str | None:
        """Wait for the numbers; what is wrong at the first step where one is not finite, or None."""
        if not self.unread:
            return None
        steps, reports = zip(*self.unread, strict=True)
        self.unread.clear()
        whole = self._summed([report.loss for report in reports])
        added = self._summed([report.routing_loss for report in reports])
        lengths = stack([report.gradient_norm for report in reports]).tolist()
        sums = map(sum, zip(whole, added, strict=True))
        for step, loss, norm, report in zip(steps, sums, lengths, reports, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = "gradient" if math.isfinite(loss) else "loss"
                return f"the {what} became infinite or not a number at step {step}{_astray(report)}"
        self.losses += whole
        self.norm, self.routing_loss = lengths[-1], added[-1]
        self.usage = {name: share.tolist() for name, share in reports[-1].usage.items()}
        return None

    def _summed(self, shares: list[Tensor]) -> list[float]:
        return sum_over_processes(stack(shares), self.rank).tolist()

    def take_mean(self) -> float:
        """The mean loss since it was last taken."""
        mean = sum(self.losses) / len(self.losses)
        self.losses = []
        return mean


def _astray(report: StepReport) -> str:
    """The first router whose choices are not numbers, if one is."""
    for name, share in report.usage.items():
        if not bool(share.isfinite().all()):
            return f", where router {name} gives scores that are not numbers"
    return ""
