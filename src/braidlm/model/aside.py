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


class Aside:
    """Runs pieces of work beside the main stream. Whoever reads their results calls `join` first."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.urgent = torch.cuda.Stream(device, priority=URGENT)
        self.pieces: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    @contextlib.contextmanager
    def piece(self, *inputs: Tensor, urgent: bool = False) -> Iterator[None]:
        """The work inside reads `inputs`; they are ready on the main stream, and are kept until it is done.

        Urgent is what the main stream waits for soon: its kernels, which should be small, go before all others.
        """
        main, stream = torch.cuda.current_stream(self.device), self.urgent if urgent else self.stream
        if len(self.pieces) == PIECES_IN_FLIGHT:
            done, _ = self.pieces[0]
            main.wait_event(done)
            self.pieces.popleft()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            yield
        done = torch.cuda.Event()
        done.record(stream)
        self.pieces.append((done, inputs))

    def last(self) -> torch.cuda.Event:
        """What to wait for if only the newest piece, and those before it, are needed."""
        return self.pieces[-1][0]

    def wait(self, done: torch.cuda.Event) -> None:
        """From here on the main stream sees what was finished then."""
        torch.cuda.current_stream(self.device).wait_event(done)

    def join(self) -> None:
        """From here on the main stream sees every result."""
        for done, _ in self.pieces:
            self.wait(done)
        self.pieces.clear()


def beside(aside: Aside | None, *inputs: Tensor, urgent: bool = False) -> contextlib.AbstractContextManager[None]:
    """A piece of work for `aside`, or, without one, simply the next work of the main stream."""
    return contextlib.nullcontext() if aside is None else aside.piece(*inputs, urgent=urgent)


class Tied:
    """The gradient of a matrix that head and embedding share: the head leaves it here, and the embedding adds to it.

    Autograd would make two matrices and a third of their sum.
    """

    def __init__(self, aside: Aside):
        self.aside = aside
        self.gradient: Tensor | None = None
        self.done: torch.cuda.Event | None = None

    def leave(self, gradient: Tensor) -> None:
        """What the newest piece of work aside has made."""
        self.gradient, self.done = gradient, self.aside.last()

    def take(self) -> Tensor:
        """The gradient, complete on the main stream; nothing is kept, or autograd would copy what it is given."""
        assert self.gradient is not None
        assert self.done is not None
        self.aside.wait(self.done)
        gradient, self.gradient = self.gradient, None
        return gradient
