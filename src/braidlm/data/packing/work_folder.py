"""The folder of unfinished work: continued by the same command, cleared by another, locked by one process at a time."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.files import make_folder, write_text
from braidlm.core.locks import lock_or_refuse, lock_or_wait
from braidlm.core.reading import system_error

KEY, LOCK = "key", "lock"


@contextlib.contextmanager
def work_folder(out: Path, key: str, wait: bool = False) -> Iterator[Path]:
    """`OUT.part`, with the work of an earlier run of the same key; removed when the block succeeds.

    It is removed too after a user's error if it contains no finished shard yet. Where another process is at work in
    it, `wait` waits for that one to end; otherwise it is an error.
    """
    folder = out.with_name(out.name + ".part")
    with _locked(folder, wait):
        if not (folder / KEY).is_file() or (folder / KEY).read_bytes() != key.encode():
            _clear(folder)
            write_text(folder / KEY, key)
        try:
            yield folder
        except BraidError:
            if not any(folder.glob("shards/*.json")):
                _remove(folder)
            raise
        _remove(folder)


@contextlib.contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[None]:
    """Make the folder and hold its lock; the process that held it before may remove it at any moment until then."""
    while True:
        make_folder(folder)
        path = folder / LOCK
        try:
            lock = open(path, "w")  # noqa: SIM115
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not path.is_symlink():
                continue
            raise system_error(error, path) from error
        with lock:
            if wait:
                lock_or_wait(lock.fileno(), folder)
            else:
                lock_or_refuse(lock.fileno(), folder, "prepare", "`--out`")
            if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                yield
                return


def _remove(folder: Path) -> None:
    """Remove the folder, and last its lock; it stays if another process locks it anew at this moment."""
    _clear(folder)
    (folder / LOCK).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _clear(folder: Path) -> None:
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name != LOCK:
            item.unlink()
