"""A gentle end: while training, Ctrl-C or a terminate signal lets the step finish and the run be saved."""

import signal
import time
from types import FrameType

import torch

from braidlm.training.parallel import Rank, sum_over_processes

PATIENCE = 1.0
"""Seconds. torchrun passes on a Ctrl-C that its processes have had from the terminal already."""


class GentleStop:
    """Remembers that someone asked for an end; a second time, it comes at once."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.asked_at: float | None = None

    def __enter__(self) -> None:
        try:
            self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: signals stay as they are
            self.before = {}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether any process was asked; the same answer on all, so that they stop after the same step."""
        here = self.asked_at is not None
        if self.rank.world_size == 1:  # without waiting for the device
            return here
        return bool(sum_over_processes(torch.tensor(float(here), device=self.rank.device), self.rank))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is not None and now - self.asked_at > PATIENCE:
            raise KeyboardInterrupt
        self.asked_at = self.asked_at or now
