"""Writing files and folders so that a crash or a full disk never leaves something that looks finished; locks.

The system releases a lock when its process ends, however it ends.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from braidlm.core.console import duration, say
from braidlm.core.errors import BraidError
from braidlm.core.reading import given_path


class DiskError(BraidError):
    """The disk is full, or the folder is not writable."""


class LockedError(BraidError):
    """Another process works in a folder."""


@contextlib.contextmanager
def atomic_folder(target: Path | str, replace: bool = False) -> Iterator[Path]:
    """A scratch folder beside `target` that becomes `target` in one rename when the block succeeds.

    With `replace`, an existing `target` is replaced only after the new folder is complete.
    """
    target = Path(target)
    _remove_leftovers(target)
    if not replace:
        check_new_folder(target)
    with explained_disk_errors(target):
        make_folder(target.parent)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        with explained_disk_errors(target), _locked(scratch):
            os.chmod(scratch, 0o755)  # mkdtemp makes folders that only their owner can read
            yield scratch
            make_final(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_new_folder(out: Path | str | None) -> None:
    """Refuse a folder to write that is not given or exists already."""
    if out is None:
        raise BraidError("give the folder to write", todo="Add `--out DIR`, or `--dry-run` to see the plan only.")
    if given_path(out).exists():
        raise BraidError("this folder exists already", str(out), "Choose another name or remove it first.")


def make_final(part: Path, target: Path) -> None:
    """Rename a complete folder to `target`; when this returns, it would survive a power cut."""
    for path in sorted(part.rglob("*")):
        if path.is_file():
            if not path.is_symlink():  # safetensors writes files that only their owner can read
                path.chmod(path.stat().st_mode | 0o044)
            _sync(path)
    _sync(part)
    if not target.exists():
        os.rename(part, target)
    else:
        old = part.with_suffix(".old")
        os.rename(target, old)
        try:
            os.rename(part, target)
        except OSError:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _sync(target.parent)


def write_text(path: Path | str, text: str) -> None:
    """Write a whole file atomically, in UTF-8; bytes of file names that are not UTF-8 are written as escapes."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a whole file atomically."""
    with atomic_file(path) as scratch:
        scratch.write_bytes(data)


@contextlib.contextmanager
def atomic_file(target: Path | str) -> Iterator[Path]:
    """A scratch file beside `target` that becomes `target` in one rename when the block succeeds."""
    target = Path(target)
    _remove_leftovers(target)
    with explained_disk_errors(target):
        make_folder(target.parent)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        scratch = Path(name)
        try:
            os.close(handle)
            with _locked(scratch):
                yield scratch
                with open(scratch, "rb+") as file:
                    os.fsync(file.fileno())
                scratch.chmod(0o644)
                os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)


def write_json(path: Path | str, data: Any) -> None:
    """Write JSON atomically, for people to read."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_yaml(path: Path | str, data: Any) -> None:
    """Write YAML atomically, for people to read: by libyaml, which is much faster than Python."""
    style: dict[str, Any] = {"sort_keys": False, "allow_unicode": True}
    try:
        text = yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), **style)
    except UnicodeEncodeError:  # a lone surrogate, which only Python escapes
        text = yaml.safe_dump(data, **style)
    write_text(path, text)


def sha256_of(path: Path | str) -> str:
    """The SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(data: Any) -> str:
    """The SHA-256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def explained_disk_errors(path: Path | str) -> Iterator[None]:
    """Turn a full disk or missing permission into an error that says so.

    When these are nested, the error names the path of the outermost, since inner ones may be scratch folders.
    """
    try:
        yield
    except DiskError as error:
        raise DiskError(error.what, str(path), error.todo) from error
    except (OSError, SafetensorError) as error:
        match = re.search(r"\(os error (\d+)\)", str(error))  # as safetensors writes it
        number = error.errno if isinstance(error, OSError) else match and int(match[1])
        if number in (errno.ENOSPC, errno.EDQUOT):
            what = "the disk is full; nothing was written"
            raise DiskError(what, str(path), "Free some space and run the same command again.") from error
        if number in (errno.EACCES, errno.EROFS):
            raise DiskError("no permission to write here", str(path), "Choose a folder you may write to.") from error
        raise


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise BraidError("a file stands where a folder is needed", str(folder), "Choose another name.") from None


def _remove_leftovers(target: Path) -> None:
    """Clean up after processes that were killed while writing `target`: restore a replaced folder, remove scratch.

    What a process that is still alive writes is locked and stays.
    """
    leftover = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}\.(part|old)")
    with contextlib.suppress(OSError):  # no such folder, or another process is cleaning up as well
        for path in [target.parent / name for name in os.listdir(target.parent) if leftover.fullmatch(name)]:
            part = path.with_suffix(".part")
            with _locked(part) as held:
                if part.exists() and not held:  # a process may be working in it, also where there are no locks
                    continue
            if not path.is_dir():
                path.unlink()
            elif path.suffix == ".old" and not target.exists():  # killed between the two renames
                os.rename(path, target)
            else:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool | None]:
    """Hold the lock of a folder or a file, if it can be had: whether it is held, or None where there are no locks."""
    handle, held = None, None
    with contextlib.suppress(OSError):  # not there, or Windows, which opens no folders
        handle = os.open(path, os.O_RDONLY)
        if (held := try_lock(handle)) is None:
            os.close(handle)  # Windows renames no file that is open
            handle = None
    try:
        yield held
    finally:
        if handle is not None:
            os.close(handle)


def try_lock(handle: int) -> bool | None:
    """Whether the lock of an open file or folder is ours now, until it is closed; None where there are no locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, or a file system without locks
        return None
    return True


def _sync(path: Path) -> None:
    if os.name != "posix":  # Windows opens no folders, and syncs no file that is opened to be read
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


POLL_SECONDS = 0.25
LOOKS, LOOK_SECONDS = 4, 0.02
"""How often, and after how many seconds, a lock is tried again before it counts as held."""
REMINDER_SECONDS = 60.0
"""How often a process that waits says so."""


def lock_or_refuse(handle: int, folder: Path, verb: str, option: str) -> None:
    """Lock a folder until the handle is closed; an error if another process holds it."""
    for _ in range(LOOKS):
        if try_lock(handle) is not False:  # where there are no locks, the user must not start two runs at once
            return
        time.sleep(LOOK_SECONDS)  # the other may only be looking (`is_locked`)
    what = f"another `braid {verb}` is at work here"
    raise LockedError(what, str(folder), f"Wait for it to end, or choose another {option}.")


def is_locked(folder: Path) -> bool:
    """Whether another process is at work in a folder, which is locked for a moment to find out."""
    with _locked(folder) as held:
        return held is False


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


@contextlib.contextmanager
def locked_folder(folder: Path, verb: str | None = None, option: str = "out") -> Iterator[None]:
    """Make a folder where there is none, and hold its lock, for which other processes may have to be waited for.

    With the `verb` that works in it, another process there is an error, which names the `option` of another folder.
    Work that fails before it has written anything leaves no folder behind that was made for it.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    with explained_disk_errors(folder):
        make_folder(folder)
        handle = os.open(folder, os.O_RDONLY)
    try:
        if verb is None:
            lock_or_wait(handle, folder)
        else:
            lock_or_refuse(handle, folder, verb, option)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty, or another process was faster
            for made in missing:
                made.rmdir()
        raise
    finally:
        os.close(handle)
