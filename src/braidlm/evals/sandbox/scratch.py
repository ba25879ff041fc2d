"""The scratch folder of a program on disk: whether too much is in it, and its deletion, whatever its shape.

A program may have nested folders deeper than a path is long, and made millions of them. So nothing here is recursive,
and a search ends as soon as a limit is exceeded.
"""

import contextlib
import errno
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Literal

MAX_ENTRIES, MAX_FOLDERS = 10_000, 1_000
"""Files and folders together, and folders alone: some file systems take milliseconds to delete one."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_DELETION_SECONDS = 30


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """A temporary folder, deleted at the end."""
    folder = tempfile.mkdtemp(prefix="braid-")
    try:
        yield folder
    finally:
        delete(folder)


def exceeded(folder: str, max_bytes: int) -> Literal["disk", "entries"] | None:
    """Which limit the folder exceeds; one that cannot be searched (too deep, no permission) exceeds that of entries."""
    size = count = folders = 0
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders += 1
                        pending.append(entry.path)
                    if count > MAX_ENTRIES or folders > MAX_FOLDERS:
                        return "entries"
                    with contextlib.suppress(FileNotFoundError):  # the program goes on while this looks
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return "entries"
    return "disk" if size > max_bytes else None


def delete(folder: str) -> None:
    """Delete a folder. Folders inside are moved to one place and emptied there one by one, so that no path is long."""
    place = tempfile.mkdtemp(prefix="braid-", dir=os.path.dirname(folder))
    names = map(str, itertools.count())
    pending = [next(names)]
    with contextlib.suppress(FileNotFoundError):  # without isolation a program may have moved it
        os.rename(folder, os.path.join(place, pending[0]))
    at = os.open(place, _FOLDER)
    deadline = time.monotonic() + _DELETION_SECONDS
    try:
        while pending:
            name = pending.pop()
            try:
                pending += _empty(name, at, names)
                os.rmdir(name, dir_fd=at)
            except OSError as error:
                if error.errno == errno.ENOTEMPTY and time.monotonic() < deadline:
                    pending.append(name)  # a program whose launcher was killed may take a moment to die
                elif error.errno != errno.ENOENT:
                    raise
    finally:
        os.close(at)
    os.rmdir(place)


def _empty(name: str, place: int, names: Iterator[str]) -> list[str]:
    """Delete the files of a folder, and move its folders; returns the moved."""
    os.chmod(name, 0o700, dir_fd=place)
    folder = os.open(name, _FOLDER, dir_fd=place)
    moved: list[str] = []
    try:
        with os.scandir(folder) as entries:
            listed = list(entries)
        for entry in listed:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=folder)  # a folder can be moved by those who may write to it
                moved.append(next(names))
                os.rename(entry.name, moved[-1], src_dir_fd=folder, dst_dir_fd=place)
            else:
                os.unlink(entry.name, dir_fd=folder)
    finally:
        os.close(folder)
    return moved
