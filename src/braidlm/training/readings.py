"""The loss and gradient norm of every step, read from the device only when someone looks."""

import math
from dataclasses import dataclass, field

from torch import Tensor, stack

from braidlm.training.parallel import Place, sum_over_processes


@dataclass
class Readings:
    """Numbers of the steps since the last record."""

    place: Place
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last record; saved with a checkpoint, so that the next record is the same after it."""
    norm: float = 0.0
    """Of the last step that was read."""
    unread: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Numbers of a step, still on the device; each process has its share of the loss."""
        self.unread.append((step, loss, norm))

    def read(self) -> str | None:
        """Wait for the numbers; what is wrong at the first step where one is not finite, or None."""
        if not self.unread:
            return None
        steps, losses, norms = zip(*self.unread, strict=True)
        self.unread.clear()
        whole = sum_over_processes(stack(losses), self.place).tolist()
        lengths = stack(norms).tolist()
        for step, loss, norm in zip(steps, whole, lengths, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = "gradient" if math.isfinite(loss) else "loss"
                return f"the {what} became infinite or not a number at step {step}"
        self.losses += whole
        self.norm = lengths[-1]
        return None

    def take_mean(self) -> float:
        """The mean loss since it was last taken."""
        mean = sum(self.losses) / len(self.losses)
        self.losses = []
        return mean
