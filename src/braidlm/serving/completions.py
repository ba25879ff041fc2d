"""A request to continue a text, and the tokens that it gets: written by the engine's thread, read in an event loop."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary, proxy

from braidlm.core.decoding.decoder import Sampling
from braidlm.serving.switches import Switches

PAUSE = 3.0
"""For how many times as long as it has sent an event loop then leaves the interpreter to the engine. So sending takes a
quarter of a core at most, and under load an event carries several tokens."""


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    prompt: tuple[int, ...]
    """Token ids; `encode_prompts` makes them."""
    max_tokens: int
    """0 only with `prompt_logprobs`."""
    sampling: Sampling = field(default_factory=Sampling)
    """A seed gives the same text whatever else runs."""
    switches: Switches = field(default_factory=Switches)
    top_logprobs: int | None = None
    """How many of the most probable tokens are told, with their log-probabilities, beside the chosen one's; None for no
    log-probabilities at all."""
    prompt_logprobs: bool = False
    """Whether the log-probabilities of the prompt's tokens are told too."""
    ignore_eos: bool = False
    """Whether the text goes on after the end of text."""


class NewToken(NamedTuple):
    """A token of a text; the last one of a text that ended by itself is its end of text."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Completion:
    """The continuation of one text, as it is generated."""

    prompt: list[NewToken] | None = None
    """The prompt's tokens with `prompt_logprobs`, before the first new token."""
    stopped: str | None = None
    """`end`, `max_tokens`, `limit` or `cancelled`."""
    cancelled = False

    def __init__(self, request: Request, on_cancel: Callable[["Completion"], None]):
        self.request = request
        self._on_cancel = on_cancel
        self._tokens: deque[NewToken] = deque()
        self._error: Exception | None = None
        self._ended = False
        self.mailbox: Mailbox | None = None
        """The mailbox of the event loop that reads the tokens, once one does."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_ready = False
        """Whether its mailbox has it already."""

    async def tokens(self) -> AsyncIterator[list[NewToken]]:
        """Everything new since the last time; an error of the request or the model is raised after what came before."""
        loop = asyncio.get_running_loop()
        self.mailbox = Mailbox.of(loop)
        while True:
            ended, new = self._ended, []
            while self._tokens:
                new.append(self._tokens.popleft())
            if new:
                yield new
            elif ended:
                break
            else:
                self._waiter = loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Stop as soon as possible; nothing happens if it has ended."""
        self.cancelled = True
        self._on_cancel(self)

    def add(self, token: NewToken) -> None:
        """The engine's: one more token."""
        self._tokens.append(token)
        self._tell()

    def end(self, stopped: str | None, error: Exception | None = None) -> None:
        """The engine's: nothing more will come."""
        self.stopped, self._error, self._ended = stopped, error, True
        self._tell()

    def _tell(self) -> None:
        if self.mailbox is not None and not self._is_ready:
            self._is_ready = True
            self.mailbox.ready.append(self)

    def wake(self) -> None:
        """The event loop's: let the reader look."""
        self._is_ready = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Mailbox:
    """Wakes the readers of one event loop, all of them in one call, and no more often than the loop can send.

    Engines append and the loop takes: a deque is safe for that without a lock, and no wake-up is lost.
    """

    of_loops: "WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox]" = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop: asyncio.AbstractEventLoop = proxy(loop)
        self.ready: deque[Completion] = deque()
        """The completions that have something new."""
        self._called = False
        self._not_before = 0.0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "Mailbox":
        """The loop's own."""
        return cls.of_loops.setdefault(loop, cls(loop))

    def post(self) -> None:
        """The engine's, after each step: let the loop know, unless it knows already."""
        if self.ready and not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError, ReferenceError):  # the loop is closed or gone: nobody reads any more
                self.loop.call_soon_threadsafe(self._wake_readers)

    def _wake_readers(self) -> None:
        if (early := self._not_before - time.monotonic()) > 0:
            self.loop.call_later(early, self._wake_readers)
            return
        begun = time.thread_time()
        for _ in range(len(self.ready)):
            self.ready.popleft().wake()
        self.loop.call_soon(self._pause, begun)

    def _pause(self, begun: float) -> None:
        """Called once the readers that were woken have sent what they had."""
        self._not_before = time.monotonic() + PAUSE * (time.thread_time() - begun)
        self._called = False
        self.post()
