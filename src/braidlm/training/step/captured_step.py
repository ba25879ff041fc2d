"""An optimizer step as a CUDA graph: recorded once, then replayed on the rows of each batch."""

import gc
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from braidlm.training.step.step_report import StepReport

EAGER_STEPS_BEFORE_CAPTURE = 3
"""Kernels are chosen, compiled code is built and optimizer state is made in these; a capture must not contain that."""


class CapturedStep:
    """A recorded step. It reads its rows from one buffer and leaves its numbers in one tensor."""

    def __init__(
        self,
        train: Callable[[Tensor, Tensor, Tensor, Tensor], StepReport],
        batch: Tensor,
        shape: tuple[int, ...],
        device: torch.device,
    ):
        """Record `train` without running it; gradients get their fixed addresses inside the graph's memory.

        `batch` is packed and its rows have this shape.
        """
        self.buffer = batch.to(device)
        inputs, labels, continues, count = self.buffer.split((math.prod(shape), math.prod(shape), shape[0], 1))
        # What compiled code leaves in reference cycles may hold the autograd graph of an eager step, whose nodes belong
        # to another stream and would break the capture.
        gc.collect()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # What the loss waits for goes before what only the optimizer waits for.
        first = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.graph(self.graph, stream=first):
            count = count.view(torch.float32)[0]
            self.results = train(inputs.view(shape), labels.view(shape), continues, count)
            self.numbers = self.results.packed()

    def replay(self, batch: Tensor) -> StepReport:
        """Train on a packed batch."""
        self.buffer.copy_(batch, non_blocking=True)
        self.graph.replay()
        return self.results.unpacked(self.numbers.clone())


def packed_batch(inputs: np.ndarray, labels: np.ndarray, continues: np.ndarray, count: int) -> Tensor:
    """All that a replayed step reads, so that it is sent at once; the count, which is last, as a float32."""
    packed = np.concatenate((inputs.ravel(), labels.ravel(), continues, np.zeros(1, np.int64)))
    packed[-1:].view(np.float32)[0] = count
    return torch.from_numpy(packed)
