"""The folder in which unfinished work lies: kept for the same command, begun anew for another, one user at a time."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.files import lock_or_refuse, write_text

KEY, LOCK = "key", "lock"


@contextlib.contextmanager
def work_folder(out: Path, key: str) -> Iterator[Path]:
    """`OUT.part`, with what an earlier run of the same key left in it; removed when the block succeeds.

    It goes too when the user's input was wrong and nothing in it is worth going on from.
    """
    folder = out.with_name(out.name + ".part")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "w") as lock:
        lock_or_refuse(lock.fileno(), folder, "prepare", "`--out`")
        if not (folder / KEY).is_file() or (folder / KEY).read_text() != key:
            _clear(folder)
            write_text(folder / KEY, key)
        try:
            yield folder
        except BraidError:
            if not any(item.is_dir() for item in folder.iterdir()):
                shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)


def _clear(folder: Path) -> None:
    for item in folder.iterdir():
        if item.is_dir():
            shutil.rmtree(item)
        elif item.name != LOCK:
            item.unlink()
