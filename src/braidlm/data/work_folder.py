"""The folder in which unfinished work lies: kept for the same command, begun anew for another, one user at a time."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.files import write_text

KEY, LOCK = "key", "lock"


@contextlib.contextmanager
def work_folder(out: Path, key: str) -> Iterator[Path]:
    """`OUT.part`, with what an earlier run of the same key left in it; removed when the block succeeds."""
    folder = out.with_name(out.name + ".part")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "w") as lock:
        _take(lock.fileno(), folder)
        if not (folder / KEY).is_file() or (folder / KEY).read_text() != key:
            _clear(folder)
            write_text(folder / KEY, key)
        yield folder
        shutil.rmtree(folder)


def _take(handle: int, folder: Path) -> None:
    """Hold the lock as long as this process lives; a killed one lets go of it."""
    try:
        import fcntl
    except ImportError:  # Windows: two runs at once are the user's to avoid
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BraidError(
            "another `braid prepare` is at work here", str(folder), "Wait for it to end, or choose another `--out`."
        ) from None


def _clear(folder: Path) -> None:
    for item in folder.iterdir():
        if item.is_dir():
            shutil.rmtree(item)
        elif item.name != LOCK:
            item.unlink()
