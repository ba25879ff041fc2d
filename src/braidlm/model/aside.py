"""A second CUDA stream for work that only the optimizer waits for: gradients of parameters.

The chain of the backward pass leaves parts of a GPU idle when its products are small; these gradients fill them.
"""

import contextlib
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

PIECES_IN_FLIGHT = 4
"""How many pieces may be under way; what they read stays in memory until then."""


class Aside:
    """Runs pieces of work beside the main stream. Whoever reads their results calls `join` first."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pieces: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    @contextlib.contextmanager
    def piece(self, *inputs: Tensor) -> Iterator[None]:
        """The work inside reads `inputs`; they are ready on the main stream, and are kept until it is done."""
        main = torch.cuda.current_stream(self.stream.device)
        if len(self.pieces) == PIECES_IN_FLIGHT:
            done, _ = self.pieces[0]
            main.wait_event(done)
            self.pieces.popleft()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            yield
        done = torch.cuda.Event()
        done.record(self.stream)
        self.pieces.append((done, inputs))

    def last(self) -> torch.cuda.Event:
        """What to wait for if only the newest piece, and those before it, are needed."""
        return self.pieces[-1][0]

    def wait(self, done: torch.cuda.Event) -> None:
        """From here on the main stream sees what was finished then."""
        torch.cuda.current_stream(self.stream.device).wait_event(done)

    def join(self) -> None:
        """From here on the main stream sees every result."""
        if self.pieces:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.pieces.clear()


def beside(aside: Aside | None, *inputs: Tensor) -> contextlib.AbstractContextManager[None]:
    """A piece of work for `aside`, or, without one, simply the next work of the main stream."""
    return contextlib.nullcontext() if aside is None else aside.piece(*inputs)


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
