"""The files of stored targets while they are written, in threads: teachers wait neither for copies nor for the disk.

One thread writes block after block. Another makes sure every few seconds that what was written is on disk, and only
then says so in the progress file: a process that is killed goes on from there.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch

from braidlm.core.files import write_json
from braidlm.training.distill.stored import IDS, LOGS, PROGRESS, Targets

MAX_WAITING = 2
"""Blocks that are being written, or wait to be: the device computes one while another is written."""
SAVED_EVERY = 5.0
"""Seconds of work that a killed process may lose."""


@dataclass(frozen=True)
class Block:
    """What follows some tokens."""

    positions: np.ndarray
    """[tokens]: where they are in the file of their data set."""
    targets: Targets
    """In the types of the files."""
    copied: torch.cuda.Event | None = None
    """When the targets have come from the device."""

    def runs(self) -> Iterator[tuple[int, Targets]]:
        """Tokens that are neighbours in the file: where they begin there, and what follows them."""
        ends = np.flatnonzero(np.diff(self.positions) != 1) + 1
        for begin, end in zip([0, *ends], [*ends, len(self.positions)], strict=True):
            yield int(self.positions[begin]), Targets(*(values[begin:end] for values in self.targets))


class TargetWriter:
    """Writes blocks in the order in which they are put."""

    def __init__(self, folder: Path, sizes: Sequence[int], done: int = 0):
        """`sizes` are the files' in bytes; `done` tokens were written before."""
        self.folder, self.sizes, self.done = folder, sizes, done
        self.files: list[FileIO] = []
        self.writing, self.saving = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.waiting: deque[Future[int]] = deque()
        self.saved: Future[None] | None = None
        self.saved_at = time.monotonic()

    def __enter__(self) -> "TargetWriter":
        # Appending makes a file where there is none, and keeps one of a process that was killed.
        for name, size in zip((IDS, LOGS), self.sizes, strict=True):
            FileIO(self.folder / name, "a").close()
            self.files.append(FileIO(self.folder / name, "r+"))
            self.files[-1].truncate(size)
        return self

    def __exit__(self, *_: object) -> None:
        self.writing.shutdown(cancel_futures=True)
        self.saving.shutdown()
        for file in self.files:
            file.close()

    def put(self, block: Block) -> None:
        """Write a block soon; an error of one before it is raised here."""
        self.waiting.append(self.writing.submit(self._write, block))
        self._wait(MAX_WAITING)
        if time.monotonic() - self.saved_at >= SAVED_EVERY and (self.saved is None or self.saved.done()):
            self._check_saved()
            self.saved, self.saved_at = self.saving.submit(self._save, self.done), time.monotonic()

    def finish(self) -> None:
        """When this returns, all is on disk."""
        self._wait(0)
        self._check_saved()
        self._save(self.done)

    def _wait(self, at_most: int) -> None:
        while self.waiting and (len(self.waiting) > at_most or self.waiting[0].done()):
            self.done += self.waiting.popleft().result()

    def _check_saved(self) -> None:
        if self.saved is not None:
            self.saved.result()

    def _write(self, block: Block) -> int:
        if block.copied is not None:
            block.copied.synchronize()
        for begin, targets in block.runs():
            for file, values in zip(self.files, targets, strict=True):
                _write_at(file, begin * values[0].nbytes, values)
        return len(block.positions)

    def _save(self, done: int) -> None:
        for file in self.files:
            os.fsync(file.fileno())
        write_json(self.folder / PROGRESS, {"done": done})


def _write_at(file: FileIO, offset: int, values: np.ndarray) -> None:
    file.seek(offset)
    left = values.data.cast("B")
    while left:  # the system may write a part
        left = left[file.write(left) :]
