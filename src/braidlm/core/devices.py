"""Devices, and whether a model fits into their memory, known before any of it is allocated."""

import contextlib
import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import nn

from braidlm.core.console import say, size
from braidlm.core.errors import BraidError


def choose_device(name: str) -> str:
    """The device of this name, checked; `auto` is a GPU of CUDA where there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        _say_why_not_mps()
        return "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device it was built without
        reason = str(error).strip().split("\n")[0]
        why = "" if reason.startswith("Expected one of") else f" ({reason})"  # all devices there could be
        todo = "Use auto, cpu or cuda." if torch.cuda.is_available() else "Use auto or cpu."
        raise BraidError(f"there is no device '{name}' here{why}", todo=todo) from None
    return name


@cache
def _say_why_not_mps() -> None:
    """Once: why `auto` leaves Apple's GPU alone."""
    if torch.backends.mps.is_available():
        say("Computing on the CPU: Braid is not tested on Apple's GPUs. `--device mps` uses this one.")


def device_name(device: torch.device) -> str:
    """The hardware's name, as results give it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


CGROUPS = Path("/sys/fs/cgroup")
SMALLER = "Make the model smaller, or use a machine with more memory."


def training_plan(model: nn.Module, device: torch.device) -> str:
    """What training a model (a skeleton will do) needs, in words; activations come on top."""
    state, free = training_state_bytes(model), free_memory(device)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    return (
        f"Training {trained:,} parameters; {frozen:,} are frozen. Memory before activations: weights "
        f"{size(weights_bytes(model))}, gradients {size(state // 3)}, AdamW's two moments {size(state * 2 // 3)}"
        + ("." if free is None else f"; {size(free)} are free.")
    )


def check_training_fits(model: nn.Module, device: torch.device, processes: int = 1) -> None:
    """Refuse to train a model (a skeleton will do) whose weights, gradients and optimizer state do not fit, or the part
    of them that each of several `processes` has.

    Activations come on top, so that a model that fits here may still run out of memory.
    """
    weights = weights_bytes(model)
    needed = (weights + training_state_bytes(model)) // processes
    check_memory(needed, device, "weights, gradients and AdamW's two moments need")
    check_weights_fit(weights, device if processes == 1 else "cpu")  # they are made there, and moved part by part


def check_weights_fit(weights: int, device: torch.device | str = "cpu") -> None:
    """Refuse weights of so many bytes if they do not fit; they are made on the CPU and then moved to the device."""
    for place in (torch.device("cpu"), torch.device(device)):
        check_memory(weights, place, "the model's weights need")


def check_memory(needed: int, device: torch.device, what: str, todo: str = SMALLER) -> None:
    """Refuse what needs more bytes than the device has free; `what` is the beginning of a sentence, `... need`."""
    free = free_memory(device)
    if free is not None and needed > free:
        place = "this machine" if device.type == "cpu" else str(device)
        raise BraidError(f"{what} {size(needed)} of memory, and {place} has {size(free)} free", todo=todo)


@contextlib.contextmanager
def explained_out_of_memory(what: str, todo: str) -> Iterator[None]:
    """Let running out of memory be an error that says what to do: activations are not known before they are there."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "can't allocate memory" not in str(error):  # torch has no class for it on a CPU
            raise
        raise BraidError(f"the memory is not enough {what}", todo=todo) from error


def weights_bytes(model: nn.Module) -> int:
    """The bytes of a model's parameters and buffers, a shared one counted once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def training_state_bytes(model: nn.Module) -> int:
    """The bytes of gradients and AdamW's two moments of the parameters that are trained."""
    return sum(3 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def free_memory(device: torch.device) -> int | None:
    """The bytes that can still be allocated, within the limits of a container; None where it is not known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    known = [free for free in (_machine_free(), *map(_group_free, _memory_groups())) if free is not None]
    return min(known, default=None)


def _machine_free() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):  # not Linux: the whole memory is the best guess
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):
            return None


def _memory_groups() -> list[Path]:
    """The control groups that may limit this process: its own and those around it, or the container's root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folder = CGROUPS / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(CGROUPS)), CGROUPS / "memory"]


def _group_free(group: Path) -> int | None:
    """What a control group (version 2 or 1) leaves; files in its cache give way when memory is needed."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            total, current = int((group / limit).read_text()), int((group / used).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or `max` for no limit
            continue
        return max(0, total - current + sum(int(counts.get(key, 0)) for key in ("active_file", "inactive_file")))
    return None


class PeakMemory:
    """How many bytes more are in memory, at most, than when it was made."""

    def __init__(self, device: torch.device):
        self.device = device
        self._before: int | None = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            with contextlib.suppress(OSError, AttributeError, TypeError):  # only glibc has it
                # What the work before left in the allocator would hide what this one takes.
                ctypes.CDLL(None).malloc_trim(0)
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # lets the peak be what is in memory now
                self._before = _status_bytes("VmRSS")

    def bytes(self) -> int | None:
        """The peak up to now; None where the system does not tell."""
        cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else _status_bytes("VmHWM")
        return None if peak is None or self._before is None else max(0, peak - self._before)


def _status_bytes(key: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)
    return None
