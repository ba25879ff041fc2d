"""Weight decay with a schedule of its own, whatever the learning rate does."""

from typing import Any

import torch
from torch import Tensor

from braidlm.training.schedules import schedules


class ScheduledDecay:
    """In each step weights are multiplied by 1 - strength x schedule; the factor is on the device for graph replay."""

    def __init__(self, strength: float, schedule: Any, parameters: list[Tensor]):
        self.strength, self.schedule, self.parameters = strength, schedules.build(schedule), parameters
        self.factor = torch.ones((), device=parameters[0].device if parameters else None)
        self.begin_step(0.0)

    def begin_step(self, share: float) -> None:
        """Set the factor of the next step, in place; `share` is the progress of the training."""
        self.factor.fill_(1 - self.strength * self.schedule(share))

    @torch.no_grad()
    def apply(self) -> None:
        """Shrink the weights that the next update changes; must not wait for the device."""
        if trained := [p for p in self.parameters if p.grad is not None]:
            torch._foreach_mul_(trained, self.factor)


def decay_outlasts_rate(optimizer: Any, schedule: Any) -> str | None:
    """A warning that weights go on decaying where the learning rate has gone to zero, or None."""
    if optimizer.decay_schedule is None or not optimizer.weight_decay or schedules.build(schedule)(1.0) > 0:
        return None
    if not schedules.build(optimizer.decay_schedule)(1.0):
        return None
    return (
        "training.optimizer.decay_schedule: the learning rate ends at 0 and the decay does not, so that at the end the "
        "weights shrink and nothing is learned; let both end at 0, or give training.schedule.final"
    )
