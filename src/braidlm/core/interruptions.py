"""Ctrl-C and SIGTERM, both as exceptions: blocks are left in order, so that nothing half-written stays behind."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM; whatever cleans up after Ctrl-C does so after this too."""


INTERRUPTIONS: dict[int, type[KeyboardInterrupt]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
"""The exception of each signal that ends a command."""


def exit_code(interruption: type[KeyboardInterrupt]) -> int:
    """128 and the signal's number, as shells have it: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (signal.SIGTERM if issubclass(interruption, Terminated) else signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the block, as Ctrl-C raises KeyboardInterrupt."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not in the main thread: signals stay as they are
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
