"""What every case must keep to: a result or a BraidError, soon, and nothing of the input is run."""

import functools
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from braidlm.core.errors import BraidError

LONGEST = 120
"""Seconds; a case takes milliseconds, a study of runs seconds, and a busy machine may pause."""
STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen")
CONNECTS = ("socket.connect", "socket.bind", "socket.getaddrinfo")

_watched = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event in (*STARTS, *CONNECTS):
        raise AssertionError(f"the input made Braid do this: {event} {arguments}")


@functools.cache
def _start_auditing() -> None:
    """Once, and not before a case needs it: the hook hears of every `id(...)`, and cannot be removed."""
    sys.addaudithook(_audit)


class Hang(BaseException):
    """A case that does not end; no `except Exception` may hide it."""


@contextmanager
def honest() -> Iterator[None]:
    """Allow a BraidError; fail for any other exception, a hang, a process or a connection."""
    global _watched

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    _start_auditing()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST)
    _watched = True
    try:
        with suppress(BraidError):
            yield
    finally:
        _watched = False
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
