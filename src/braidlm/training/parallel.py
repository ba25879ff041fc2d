"""The rank of this process and its device, and data parallelism around a single-device model."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from braidlm.core.errors import BraidError


@dataclass(frozen=True)
class Rank:
    """This process among its peers."""

    index: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.index == 0


@contextlib.contextmanager
def join_group(device: str | None = None) -> Iterator[Rank]:
    """Join the processes that torchrun started, or be the only one."""
    rank = Rank(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), _device(device))
    if rank.world_size == 1:
        yield rank
        return
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    dist.init_process_group("nccl" if rank.device.type == "cuda" else "gloo")
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def is_main_process() -> bool:
    """Whether this process writes the files and messages for all that torchrun started."""
    return int(os.environ.get("RANK", 0)) == 0


def _device(name: str | None) -> torch.device:
    if name is None or name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # each process of this machine has a GPU of its own
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device it was built without
        reason = str(error).strip().split("\n")[0]
        raise BraidError(f"there is no device '{name}' here ({reason})", todo="Use auto, cpu or cuda.") from None
    return torch.device(name)


def data_parallel(module: nn.Module, rank: Rank) -> nn.Module:
    """The module with its gradients averaged over processes."""
    if rank.world_size == 1:
        return module
    return DistributedDataParallel(module, device_ids=[rank.device.index] if rank.device.type == "cuda" else None)


def sum_over_processes(value: torch.Tensor, rank: Rank) -> torch.Tensor:
    """The sum of a number over all processes."""
    if rank.world_size > 1:
        dist.all_reduce(value)
    return value


def wait_for_all(rank: Rank) -> None:
    """Return when every process has reached this call."""
    if rank.world_size > 1:
        dist.barrier()
