"""Writing files and folders so that a crash or a full disk never leaves something that looks finished."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError


@contextlib.contextmanager
def atomic_folder(target: Path | str, replace: bool = False) -> Iterator[Path]:
    """A scratch folder beside `target` that becomes `target` in one rename when the block succeeds.

    With `replace`, an existing `target` gives way only after the new folder is complete.
    """
    target = Path(target)
    if target.exists() and not replace:
        raise BraidError("this folder exists already", str(target), "Choose another name or remove it first.")
    with explained_disk_errors(target):
        _make_folder(target.parent)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        with explained_disk_errors(target):
            os.chmod(scratch, 0o755)  # mkdtemp's folders are for their owner alone
            yield scratch
            _sync_tree(scratch)
            _put_in_place(scratch, target)
            _sync(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_text(path: Path | str, text: str) -> None:
    """Write a whole file atomically."""
    path = Path(path)
    with explained_disk_errors(path):
        _make_folder(path.parent)
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(scratch, 0o644)
            os.replace(scratch, path)
        finally:
            Path(scratch).unlink(missing_ok=True)


def write_json(path: Path | str, data: Any) -> None:
    """Write JSON atomically, for people to read."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Read JSON, or say which file is missing or broken."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BraidError("this file does not exist", str(path)) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BraidError(f"this is not valid JSON ({error})", str(path)) from None


def sha256_of(path: Path | str) -> str:
    """The SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def explained_disk_errors(path: Path | str) -> Iterator[None]:
    """Turn a full disk or a forbidden place into an error that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BraidError(
                "the disk is full; nothing was written", str(path), "Free some space and run the same command again."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS):
            raise BraidError("no permission to write here", str(path), "Choose a folder you may write to.") from error
        raise


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise BraidError("a file stands where a folder is needed", str(folder), "Choose another name.") from None


def _put_in_place(scratch: Path, target: Path) -> None:
    if not target.exists():
        os.rename(scratch, target)
        return
    old = scratch.with_suffix(".old")
    os.rename(target, old)
    try:
        os.rename(scratch, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
