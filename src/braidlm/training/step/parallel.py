"""The rank of this process among those that torchrun started, its device, and what the processes tell each other."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from braidlm.core.devices import choose_device

T = TypeVar("T")


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
    """Join the process group that torchrun started, or be the only process."""
    rank = Rank(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), _device(device))
    if rank.world_size == 1:
        yield rank
        return
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if rank.device.type == "cuda" else "gloo")
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def is_main_process() -> bool:
    """Whether this process writes the files and messages for all that torchrun started."""
    return int(os.environ.get("RANK", 0)) == 0


def _device(name: str | None) -> torch.device:
    name = choose_device(name or "auto")
    if name == "cuda":  # each process of this machine has a GPU of its own
        name = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    return torch.device(name)


def sum_over_processes(value: torch.Tensor, rank: Rank) -> torch.Tensor:
    """The sum of a number over all processes."""
    if rank.world_size > 1:
        dist.all_reduce(value)
    return value


def broadcast(value: T, rank: Rank) -> T:
    """The main process's value, in every process."""
    if rank.world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def main_first(make: Callable[[], T], rank: Rank) -> T:
    """What `make` gives, in every process: the main one prepares what is missing, and the others find it there."""
    made = make() if rank.is_main else None
    wait_for_all(rank)
    return make() if made is None else made


def wait_for_all(rank: Rank) -> None:
    """Return when every process has reached this call."""
    if rank.world_size > 1:
        dist.barrier()
