"""The rank of this process among those that torchrun started, its device, and what the processes tell each other."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError

T = TypeVar("T")
LOST = "another process of this run has ended or does not answer, so that this one ends too"
GO_ON = "The same command goes on from the newest checkpoint."
BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL error")
"""How torch says that another process is gone."""


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
    name = choose_device(device or "auto")
    if name == "cuda":  # each process of this machine has a GPU of its own
        name = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    rank = Rank(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), torch.device(name))
    if rank.world_size == 1:
        yield rank
        return
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if rank.device.type == "cuda" else "gloo")
    watch = Watch(rank)
    try:
        yield rank
        wait_for_all(rank)
        watch.end()
        wait_for_all(rank)  # the first to leave takes the store along
    except RuntimeError as error:
        if not any(word in str(error) for word in BROKEN):
            raise
        raise BraidError(LOST, todo=GO_ON) from error
    finally:
        dist.destroy_process_group()


class Watch:
    """Ends this process with a sentence when another one of its group is lost: what waits for that waits for ever.

    Every process counts in the group's store, and looks whether the others go on counting.
    """

    def __init__(self, rank: Rank, every: float = 5.0, patience: float = 40.0):
        """`every` so many seconds a process counts; one that has not counted for `patience` seconds is lost."""
        self.rank, self.every, self.patience = rank, every, patience
        self.ended = threading.Event()
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Look no more: all have done their work."""
        self.ended.set()
        self.thread.join(self.every)

    def _run(self) -> None:
        keys = [f"process {index}" for index in range(self.rank.world_size)]
        seen: dict[str, tuple[bytes, float]] = {}
        count = 0
        while not self.ended.wait(self.every if count else 0):
            count += 1
            now, counts = time.monotonic(), [seen.get(key, (b"", 0.0))[0] for key in keys]
            with contextlib.suppress(RuntimeError):
                self.store.set(keys[self.rank.index], str(count))
                counts = self.store.multi_get(keys)
            for key, value in zip(keys, counts, strict=True):
                before, since = seen.get(key, (None, now))
                seen[key] = (value, since if before == value else now)
            lost = [key for key, (_, since) in seen.items() if now - since > self.patience]
            if lost and not self.ended.is_set():
                sys.stderr.write(f"{LOST} ({', '.join(lost)}). {GO_ON}\n")
                sys.stderr.flush()
                os._exit(2)


def is_main_process() -> bool:
    """Whether this process writes the files and messages for all that torchrun started."""
    return int(os.environ.get("RANK", 0)) == 0


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


def take_from_main(module: nn.Module, rank: Rank) -> None:
    """Give the parameters and buffers of a module the values that they have in the main process."""
    if rank.world_size > 1:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)


def main_first(make: Callable[[], T], rank: Rank) -> T:
    """What `make` gives, in every process: the main one prepares what is missing, and the others find it there."""
    made = make() if rank.is_main else None
    wait_for_all(rank)
    return make() if made is None else made


def wait_for_all(rank: Rank) -> None:
    """Return when every process has reached this call."""
    if rank.world_size > 1:
        dist.barrier()
