"""Reading part of a file that somebody else may be writing, or may have put there to be read by mistake."""

import os
import stat
from pathlib import Path
from typing import NamedTuple


class FilePart(NamedTuple):
    """Some bytes of a file, and which file it was."""

    data: bytes
    size: int
    """Of the whole file."""
    inode: int


def read_part(path: Path, offset: int, size: int) -> FilePart:
    """At most `size` bytes of a plain file, from `offset`; an OSError for links, pipes and devices."""
    # A pipe would be waited for, and a link may lead anywhere; Windows has neither flag.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a plain file")
        file.seek(offset)
        return FilePart(file.read(size), status.st_size, status.st_ino)
