"""What ends a command: errors that a user can cause, and Ctrl-C and SIGTERM, all of them exceptions.

Blocks are left in order, so that nothing half-written stays behind. `BraidError` itself is in `model`, because a model
folder must work without braidlm.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from braidlm.model.errors import BraidError, did_you_mean

__all__ = ["BraidError", "check_folder_name", "collecting", "did_you_mean", "errors_at"]

MAX_NAME_BYTES = 200
"""File systems allow 255; a name also gets suffixes."""


def check_folder_name(key: str, name: str) -> None:
    """Refuse a name that is not the name of one folder: it would be made, or emptied, somewhere else."""
    if not name.strip() or name in (".", "..") or any(character in name for character in "/\\\0"):
        raise BraidError(f"{key}: expected the name of one folder, got '{name}'", todo="Use out=DIR for another place.")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise BraidError(f"{key}: a name may have at most {MAX_NAME_BYTES} bytes, got '{name[:20]}...'")


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Let an error in the block say where what it checked was read, which the check itself does not know."""
    try:
        yield
    except BraidError as error:
        raise BraidError(error.what, where, error.todo) from error


@contextmanager
def collecting(problems: list[str], label: str = "") -> Iterator[None]:
    """Add an error in the block to `problems` and go on, so that one error can report all of them.

    The label comes before each problem of the error; indented lines belong to the problem above them.
    """
    try:
        yield
    except BraidError as error:
        problems.append(re.sub(r"^(?! )", lambda _: label, error.what, flags=re.MULTILINE))


class Terminated(KeyboardInterrupt):
    """SIGTERM; whatever cleans up after Ctrl-C does so after this too."""


INTERRUPTIONS: dict[int, type[KeyboardInterrupt]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
"""The exception of each signal that ends a command."""


def exit_code(interruption: type[KeyboardInterrupt]) -> int:
    """128 and the signal's number, as shells have it: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (signal.SIGTERM if issubclass(interruption, Terminated) else signal.SIGINT)


def until_stopped(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; Ctrl-C and SIGTERM end it with a message and a code of their own."""
    try:
        with _stoppable():
            return command()
    except KeyboardInterrupt as error:
        sys.stderr.write(_message(type(error)))
        return exit_code(type(error))


def _message(interruption: type[KeyboardInterrupt]) -> str:
    return f"error: {'terminated' if issubclass(interruption, Terminated) else 'interrupted'}\n"


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the block, and Ctrl-C KeyboardInterrupt, where it is not ignored."""
    try:
        before = {n: signal.signal(n, _stop) for n in INTERRUPTIONS if signal.getsignal(n) is not signal.SIG_IGN}
    except ValueError:  # not in the main thread: signals stay as they are
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """Raise the exception of a signal; during an import, which may catch it and go on with half a module, end here."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, _message(INTERRUPTIONS[number]).encode())
            os._exit(exit_code(INTERRUPTIONS[number]))
        frame = frame.f_back
    raise INTERRUPTIONS[number]
