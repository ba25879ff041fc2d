"""The numbers of one optimizer step."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class StepReport:
    """Numbers of one step, still on the device; each process has its share of the losses."""

    loss: Tensor
    """Of the text."""
    gradient_norm: Tensor
    routing_loss: Tensor
    """What routers add to the loss, 0 where there are none."""
    usage: dict[str, Tensor]
    """For each router, the share of the weight that each of its choices had in the last forward pass."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """The recipe's extra losses by name, without their weights."""

    def packed(self) -> Tensor:
        """All numbers one after the other, so that they are copied at once."""
        return torch.cat([number.view(-1) for number in self._numbers()])

    def unpacked(self, numbers: Tensor) -> "StepReport":
        """A report like this one, of other numbers that were packed."""
        parts = numbers.split([number.numel() for number in self._numbers()])
        loss, norm, routing_loss, *others = parts
        usage = dict(zip(self.usage, others, strict=False))
        extra = dict(zip(self.extra, (number[0] for number in others[len(usage) :]), strict=True))
        return StepReport(loss[0], norm[0], routing_loss[0], usage, extra)

    def _numbers(self) -> list[Tensor]:
        return [self.loss, self.gradient_norm, self.routing_loss, *self.usage.values(), *self.extra.values()]
