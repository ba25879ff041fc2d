"""The peak of the memory that a piece of work takes, on a GPU or of this process."""

import contextlib
import ctypes
import gc
from pathlib import Path
from typing import Self

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What Linux takes for: the peak is what is in memory now."""


class PeakMemory:
    """How many bytes more were in memory, at most, than before the block."""

    def __init__(self, device: torch.device):
        self.device = device
        self.bytes: int | None = None
        """None where the system does not tell."""
        self._before: int | None = None

    def __enter__(self) -> Self:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            with contextlib.suppress(OSError, AttributeError):
                # What the work before left in the allocator would hide what this one takes.
                ctypes.CDLL(None).malloc_trim(0)
            with contextlib.suppress(OSError):
                CLEAR.write_text(RESET_PEAK)
                self._before = _status("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            cuda = self.device.type == "cuda"
            peak = torch.cuda.max_memory_allocated(self.device) if cuda else _status("VmHWM")
            self.bytes = None if peak is None else max(0, peak - self._before)


def _status(key: str) -> int | None:
    """A size of this process in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = STATUS.read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)
    return None
