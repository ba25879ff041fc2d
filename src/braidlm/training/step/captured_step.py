"""An optimizer step as a CUDA graph: recorded once, then replayed on the rows of each batch; and its numbers."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

EAGER_STEPS_BEFORE_CAPTURE = 3
"""Kernels are chosen, compiled code is built and optimizer state is made in these; a capture must not contain that."""


@dataclass
class StepReport:
    """Numbers of one step, still on the device; each process has its share of the losses."""

    loss: Tensor
    """The loss of the text."""
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


class CapturedStep:
    """A recorded step. It reads its rows from one buffer and leaves its numbers in one tensor."""

    def __init__(
        self,
        train: Callable[[Tensor, Tensor, Tensor], StepReport],
        batch: Tensor,
        shape: tuple[int, ...],
        device: torch.device,
    ):
        """Record `train` without running it; gradients get their fixed addresses inside the graph's memory.

        `batch` is packed and its rows have this shape.
        """
        self.buffer = batch.to(device)
        inputs, labels, count = self.buffer.split((math.prod(shape), math.prod(shape), 1))
        # What compiled code leaves in reference cycles may hold the autograd graph of an eager step, whose nodes belong
        # to another stream and would break the capture.
        gc.collect()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # What the loss waits for goes before what only the optimizer waits for.
        first = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.graph(self.graph, stream=first):
            count = count.view(torch.float32)[0]
            self.results = train(inputs.view(shape), labels.view(shape), count)
            self.numbers = self.results.packed()

    def replay(self, batch: Tensor) -> StepReport:
        """Train on a packed batch."""
        self.buffer.copy_(batch, non_blocking=True)
        self.graph.replay()
        return self.results.unpacked(self.numbers.clone())


def packed_batch(inputs: np.ndarray, labels: np.ndarray, count: int) -> Tensor:
    """All that a replayed step reads, so that it is sent at once; the count, which is last, as a float32."""
    packed = np.concatenate((inputs.ravel(), labels.ravel(), np.zeros(1, np.int64)))
    packed[-1:].view(np.float32)[0] = count
    return torch.from_numpy(packed)
