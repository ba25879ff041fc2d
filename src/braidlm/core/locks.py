"""Locks of folders between processes; the system releases a lock when its process ends, however it ends."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from braidlm.core.console import duration, say
from braidlm.core.errors import BraidError
from braidlm.core.files import make_folder, try_lock

POLL_SECONDS = 0.25
REMINDER_SECONDS = 60.0
"""How often a process that waits says so."""


def lock_or_refuse(handle: int, folder: Path, verb: str, option: str) -> None:
    """Lock a folder until the handle is closed; an error if another process holds it."""
    if try_lock(handle) is False:  # where there are no locks, the user must not start two runs at once
        raise BraidError(
            f"another `braid {verb}` is at work here", str(folder), f"Wait for it to end, or choose another {option}."
        )


def lock_or_wait(handle: int, folder: Path) -> None:
    """Lock a folder until the handle is closed, as soon as no other process holds it."""
    if try_lock(handle) is not False:
        return
    say(f"Another process is at work in {folder}. Waiting for it to end.")
    started = reminded = time.monotonic()
    while try_lock(handle) is False:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if now - reminded >= REMINDER_SECONDS:
            reminded = now
            say(f"Still waiting for {folder} after {duration(now - started)}.")


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make a folder where there is none, and hold its lock, for which other processes may have to be waited for.

    Work that fails before it has written anything leaves no folder behind that was made for it.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_or_wait(handle, folder)
        yield
    except BaseException:
        with suppress(OSError):  # not empty, or another process was faster
            for made in missing:
                made.rmdir()
        raise
    finally:
        os.close(handle)
