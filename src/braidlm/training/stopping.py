"""Stopping by a signal: Ctrl-C or SIGTERM lets the step finish and the run be saved."""

import signal
import time
from types import FrameType

import torch

from braidlm.core.interruptions import INTERRUPTIONS, Terminated
from braidlm.training.step.parallel import Rank, sum_over_processes

PATIENCE = 1.0
"""Seconds. A second signal within them is torchrun forwarding the same Ctrl-C."""


class StopSignal:
    """Records a request to stop; the second one interrupts at once."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.requested_at: float | None = None
        self.interruption: type[KeyboardInterrupt] = Terminated
        """The kind of the first signal; of a process that was asked by another, SIGTERM."""

    def __enter__(self) -> None:
        try:
            self.previous = {number: signal.signal(number, self._handle) for number in INTERRUPTIONS}
        except ValueError:  # not in the main thread: signals stay as they are
            self.previous = {}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether any process received a signal; the same answer on all, so that they stop after the same step."""
        here = self.requested_at is not None
        if self.rank.world_size == 1:  # without waiting for the device
            return here
        return bool(sum_over_processes(torch.tensor(float(here), device=self.rank.device), self.rank))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested_at is None:
            self.requested_at, self.interruption = now, INTERRUPTIONS[number]
        elif now - self.requested_at > PATIENCE:
            raise INTERRUPTIONS[number]
