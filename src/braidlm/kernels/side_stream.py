"""CUDA streams beside the main one, for work that only the optimizer waits for: gradients of parameters, readings of
routers.

The chain of the backward pass leaves parts of a GPU idle when its products are small; these gradients fill them.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

MAX_IN_FLIGHT = 16
"""Pieces of work that may be unfinished. Their inputs stay in memory until then; for more, the main stream waits."""
HIGH_PRIORITY = -2
"""Above the priority of the main stream."""


class SideStream:
    """Runs work beside the main stream. Whoever reads its results calls `synchronize` first."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.priority_stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self.in_flight: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.last_priority_event: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def work(self, *inputs: Tensor, priority: bool = False) -> Iterator[None]:
        """The kernels launched inside read `inputs`, which are ready on the main stream and are kept until then.

        Work with priority should be small: its kernels overtake large products. Later work without priority sees its
        results, but not the other way round.
        """
        main, stream = torch.cuda.current_stream(self.device), self.priority_stream if priority else self.stream
        if len(self.in_flight) == MAX_IN_FLIGHT:
            event, _ = self.in_flight[0]
            main.wait_event(event)
            self.in_flight.popleft()
        stream.wait_stream(main)
        if self.last_priority_event is not None and not priority:
            stream.wait_event(self.last_priority_event)
            self.last_priority_event = None
        with torch.cuda.stream(stream):
            yield
        event = torch.cuda.Event()
        event.record(stream)
        self.last_priority_event = event if priority else self.last_priority_event
        self.in_flight.append((event, inputs))

    def last_event(self) -> torch.cuda.Event:
        """The event that ends the newest work."""
        return self.in_flight[-1][0]

    def wait_event(self, event: torch.cuda.Event) -> None:
        """Make the main stream wait for the work that ends with an event."""
        torch.cuda.current_stream(self.device).wait_event(event)
        self.in_flight = deque(work for work in self.in_flight if work[0] is not event)

    def synchronize(self) -> None:
        """Make the main stream wait for all work."""
        for event, _ in tuple(self.in_flight):
            self.wait_event(event)
        self.last_priority_event = None


_current = threading.local()


def current_side_stream() -> SideStream | None:
    """The side stream of this thread. Autograd runs backward passes in threads of its own, so an autograd function
    keeps in its `ctx` what this returns in the forward pass.
    """
    return getattr(_current, "side", None)


@contextlib.contextmanager
def use_side_stream(side: SideStream | None) -> Iterator[None]:
    """Make `side` this thread's side stream, as `torch.cuda.stream` does for the main one."""
    before, _current.side = current_side_stream(), side
    try:
        yield
    finally:
        _current.side = before


def on_side(
    side: SideStream | None, *inputs: Tensor, priority: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Run what is inside on `side`, or, without one, on the main stream."""
    return contextlib.nullcontext() if side is None else side.work(*inputs, priority=priority)


class DeferredGradient:
    """A gradient that one autograd function hands to another past autograd, which would read it too early.

    The embedding adds to the head's gradient of the matrix that they share, where autograd would make two matrices and
    a third of their sum.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.ready: tuple[SideStream, torch.cuda.Event] | None = None

    def write(self, gradient: Tensor, side: SideStream | None) -> None:
        """Keep a gradient that is the result of the newest work of `side`, or, without one, of the main stream."""
        self.gradient, self.ready = gradient, None if side is None else (side, side.last_event())

    def read(self) -> Tensor:
        """The gradient, complete on the main stream. No reference is kept, or autograd would copy it."""
        assert self.gradient is not None
        if self.ready is not None:
            side, event = self.ready
            side.wait_event(event)
        gradient, self.gradient = self.gradient, None
        return gradient
