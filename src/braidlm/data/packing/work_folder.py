"""The folder of unfinished work: continued by the same command, cleared by another, locked by one process at a time."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.files import lock_or_refuse, make_folder, write_text
from braidlm.core.reading import explained_system_errors

KEY, LOCK = "key", "lock"


@contextlib.contextmanager
def work_folder(out: Path, key: str) -> Iterator[Path]:
    """`OUT.part`, with the work of an earlier run of the same key; removed when the block succeeds.

    It is removed too after a user's error if it contains no finished shard yet.
    """
    folder = out.with_name(out.name + ".part")
    make_folder(folder)
    with explained_system_errors(folder / LOCK):
        lock = open(folder / LOCK, "w")  # noqa: SIM115
    with lock:
        lock_or_refuse(lock.fileno(), folder, "prepare", "`--out`")
        if not (folder / KEY).is_file() or (folder / KEY).read_bytes() != key.encode():
            _clear(folder)
            write_text(folder / KEY, key)
        try:
            yield folder
        except BraidError:
            if not any(folder.glob("shards/*.json")):
                shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)


def _clear(folder: Path) -> None:
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name != LOCK:
            item.unlink()
