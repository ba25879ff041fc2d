"""A run's folder: whose it is, and that only one process group works in it."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors, write_text
from braidlm.core.runs import RECIPE, is_run


def check_folder(folder: Path, recipe: dict[str, Any], fresh: bool) -> None:
    """Refuse a folder that holds something else than this run; nothing is written."""
    if folder.exists() and not folder.is_dir():
        raise BraidError("a file stands where the run's folder should be", str(folder), "Choose another with out=DIR.")
    if is_run(folder):
        before = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
        changed = [] if fresh else changes(before, recipe)
        if changed:
            raise BraidError(
                "this run folder belongs to another recipe: " + listed(changed),
                str(folder),
                "Give the new run a folder of its own (out=DIR), or start this one anew with --fresh.",
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise BraidError("this folder exists and is not a run", str(folder), "Choose another with out=DIR.")


@contextlib.contextmanager
def claimed(folder: Path, recipe: dict[str, Any], fresh: bool) -> Iterator[None]:
    """Make the folder this run's, and keep other processes out while the block runs."""
    with explained_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        if fresh:
            for item in folder.iterdir():
                shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
        if not is_run(folder):
            write_text(folder / RECIPE, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    """Held until the handle is closed, also by kill -9."""
    try:
        import fcntl
    except ImportError:  # Windows: two runs at once are the user's to avoid
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BraidError(
            "another `braid train` is at work here", str(folder), "Wait for it to end, or choose another with out=DIR."
        ) from None
    except OSError:  # a file system without locks
        return


def changes(before: Any, now: Any, where: str = "") -> list[str]:
    """What differs between two trees of plain data, by path."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [c for k in keys for c in changes(before.get(k), now.get(k), f"{where}.{k}" if where else str(k))]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [c for i, (a, b) in pairs for c in changes(a, b, f"{where}[{i}]")]
    return [] if before == now else [f"{where} was {_told(before)} and is {_told(now)}"]


def listed(problems: list[str], most: int = 5) -> str:
    """The first few of many."""
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def _told(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
