"""Further CUDA streams for work that only the optimizer waits for: gradients of parameters, readings of routers.

The chain of the backward pass leaves parts of a GPU idle when its products are small; these gradients fill them.
"""

import contextlib
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

PIECES_IN_FLIGHT = 16
"""How many pieces may be under way; what they read stays in memory until then, and the main stream waits for more."""
URGENT = -2
"""A priority above that of the main stream."""


class SideStream:
    """Runs pieces of work beside the main stream. Whoever reads their results calls `join` first."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.urgent = torch.cuda.Stream(device, priority=URGENT)
        self.pieces: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.last_urgent: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def piece(self, *inputs: Tensor, urgent: bool = False) -> Iterator[None]:
        """The work inside reads `inputs`; they are ready on the main stream, and are kept until it is done.

        Urgent is what should not wait behind large products: its kernels, which should be small, go before all others.
        What urgent pieces have made is seen by those that come later, but not the other way round.
        """
        main, stream = torch.cuda.current_stream(self.device), self.urgent if urgent else self.stream
        if len(self.pieces) == PIECES_IN_FLIGHT:
            done, _ = self.pieces[0]
            main.wait_event(done)
            self.pieces.popleft()
        stream.wait_stream(main)
        if self.last_urgent is not None and not urgent:
            stream.wait_event(self.last_urgent)
            self.last_urgent = None
        with torch.cuda.stream(stream):
            yield
        done = torch.cuda.Event()
        done.record(stream)
        self.last_urgent = done if urgent else self.last_urgent
        self.pieces.append((done, inputs))

    def last(self) -> torch.cuda.Event:
        """What to wait for if only the newest piece, and those before it, are needed."""
        return self.pieces[-1][0]

    def wait(self, done: torch.cuda.Event) -> None:
        """From here on the main stream sees what was finished then."""
        torch.cuda.current_stream(self.device).wait_event(done)
        self.pieces = deque(piece for piece in self.pieces if piece[0] is not done)

    def join(self) -> None:
        """From here on the main stream sees every result."""
        for done, _ in tuple(self.pieces):
            self.wait(done)
        self.last_urgent = None


def on_side(side: SideStream | None, *inputs: Tensor, urgent: bool = False) -> contextlib.AbstractContextManager[None]:
    """A piece of work for `side`, or, without one, simply the next work of the main stream."""
    return contextlib.nullcontext() if side is None else side.piece(*inputs, urgent=urgent)


class DeferredGradient:
    """A gradient that one part leaves for another, past autograd, which would read it at once: it may be made side.

    So the embedding adds to what the head leaves of the matrix that they share, where autograd would make two matrices
    and a third of their sum.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.made: tuple[SideStream, torch.cuda.Event] | None = None

    def leave(self, gradient: Tensor, side: SideStream | None) -> None:
        """What the newest piece of work side has made, or, without one, the main stream."""
        self.gradient, self.made = gradient, None if side is None else (side, side.last())

    def take(self) -> Tensor:
        """The gradient, complete on the main stream; nothing is kept, or autograd would copy what it is given."""
        assert self.gradient is not None
        if self.made is not None:
            side, done = self.made
            side.wait(done)
        gradient, self.gradient = self.gradient, None
        return gradient
