"""How many CPU threads compute a step: the fastest number, measured before the first step.

Threads of one operation wait for each other. Where another program holds a core, all wait until it is given back: on
two busy cores two threads were fifteen times slower than one (LOG.md). So the number depends on the model, the machine
and its load. It is kept in the run's checkpoints: sums are divided among threads, and a resumed run must round alike.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from braidlm.core import console
from braidlm.training.step.parallel import Rank, broadcast
from braidlm.training.trainables.trainable import Trainable

TRIALS = 2
ADVANTAGE = 0.9
"""More threads are taken only where they need less than this share of the time, since the machine may get busier."""
VARIABLE = "OMP_NUM_THREADS"
STARVED = 0.6
"""Threads that get less than this share of a core each wait for cores: undisturbed they get 0.8 or more (LOG.md)."""
PATIENCE = 10.0
"""Seconds of training before a run says that its threads wait."""


def choose_threads(
    trained: Trainable, shape: tuple[int, int], rank: Rank, asked: int | None, saved: int | None
) -> int | None:
    """The number of the recipe, else of the checkpoint, else of the environment, else the fastest.

    None on a GPU, where it does not matter.
    """
    if rank.device.type != "cpu":
        return None
    if asked is not None or saved is not None:
        threads = asked if asked is not None else saved
        if threads != torch.get_num_threads():
            console.say(f"Computing with {_counted(threads)}, as {'the recipe says' if asked else 'before'}.")
        return threads
    most = torch.get_num_threads()
    if most == 1 or os.environ.get(VARIABLE):  # somebody chose: the user, or torchrun for several processes
        return most
    measured = fastest(lambda: _seconds_of_a_pass(trained, shape), most) if rank.is_main else most
    threads = broadcast(measured, rank)
    console.say(f"Computing with {_counted(threads)} of {most}, the fastest here now; training.threads=N sets another.")
    return threads


class StarvedThreads:
    """Notices that the threads of a run wait for cores that another program took after their number was chosen.

    The run goes on with them, because another number rounds differently; its user may choose.
    """

    def __init__(self) -> None:
        self.low: list[float] = []
        """Seconds of each reading since the threads wait."""
        self.said = False

    def update(self, threads: int, cores: float, seconds: float) -> str | None:
        """A warning, once, after `seconds` in which the threads had the time of so many `cores`."""
        if threads == 1 or self.said:
            return None
        self.low = [*self.low, seconds] if cores < STARVED * threads else []
        # One reading alone may be of something else than steps, such as compiling.
        self.said = len(self.low) > 1 and sum(self.low) >= PATIENCE
        if not self.said:
            return None
        return (
            f"{_counted(threads)} get the time of {cores:.1f} cores here, probably because another program runs too. "
            "They wait for each other, so that fewer may be faster: stop with Ctrl-C, and the same command with "
            f"training.threads={max(1, int(cores))} goes on from there"
        )


def saved_threads(position: dict[str, Any]) -> int | None:
    """The number that a checkpoint was computed with; None if that was on a GPU."""
    threads = position.get("threads", torch.get_num_threads())  # earlier versions took torch's own number
    if threads is not None and not (isinstance(threads, int) and threads >= 1):
        raise ValueError(f"{threads} is no number of threads")
    return threads


def fastest(seconds: Callable[[], float], most: int) -> int:
    """The best number of threads among `most` and its halves; one that is clearly slower than more ends the search."""
    best, best_seconds, threads = most, float("inf"), most
    while threads >= 1:
        with using_threads(threads):
            seconds()  # the first pass starts the threads
            taken = min(seconds() for _ in range(TRIALS))
        if taken * ADVANTAGE > best_seconds:
            break
        best, best_seconds, threads = threads, min(taken, best_seconds), threads // 2
    return best


@contextlib.contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Compute with this number of threads; None leaves it as it is."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds_of_a_pass(trained: Trainable, shape: tuple[int, int]) -> float:
    """A forward and a backward pass over random tokens; neither the gradients nor the random state are touched."""
    with torch.random.fork_rng(devices=[]):
        ids, objective = torch.randint(trained.model.config.vocab_size, shape), trained.objective()
        begin = time.perf_counter()
        losses = objective(ids, ids, torch.tensor(float(ids.numel())))
        whole = losses.text if losses.routing is None else losses.text + losses.routing
        torch.autograd.grad(whole, [p for p in trained.model.parameters() if p.requires_grad], allow_unused=True)
        return time.perf_counter() - begin


def _counted(threads: int | None) -> str:
    return f"{threads} CPU thread{'' if threads == 1 else 's'}"
