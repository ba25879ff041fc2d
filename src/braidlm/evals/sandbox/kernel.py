"""Linux system calls without a function in Python: namespaces, mounts, and restrictions of a process."""

import ctypes
import os
import platform
from collections.abc import Iterable

MACHINE = platform.machine()
SUPPORTED = ("x86_64", "aarch64")
"""Machines whose system call numbers are in these files."""

NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000

READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXECUTION, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
DETACH = 2
AT_HERE, AT_RECURSIVE = -100, 0x8000

DIE_WITH_PARENT, MAY_BE_READ, FILTER_CALLS, ADOPT_ORPHANS, NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "users")]


def checked(result: int, what: str) -> int:
    """The result of a call, or an OSError that says what it was for."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} ({what})")
    return result


def system_call(number: int, *arguments: object, what: str) -> int:
    """Any system call by its number."""
    return checked(_libc.syscall(ctypes.c_long(number), *arguments), what)


def unshare(namespaces: int) -> None:
    """Leave the namespaces of the parent."""
    checked(_libc.unshare(namespaces), "new namespaces")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    encoded = [value.encode() if value is not None else None for value in (source, target, kind)]
    checked(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()), f"mounting {target}")


def restrict_mount(target: str, attributes: int, recursive: bool = True) -> None:
    """Make a mount, and those below it, read-only or less: mount_setattr(2), of Linux 5.12."""
    change = _MountAttributes(set=attributes)
    system_call(
        _MOUNT_SETATTR,
        ctypes.c_int(AT_HERE),
        ctypes.c_char_p(target.encode()),
        ctypes.c_uint(AT_RECURSIVE if recursive else 0),
        ctypes.byref(change),
        ctypes.c_size_t(ctypes.sizeof(change)),
        what=f"restricting {target}",
    )


def pivot_root(new: str, old: str) -> None:
    """The folder `new` becomes /, and the old / becomes its folder `old`."""
    paths = (ctypes.c_char_p(new.encode()), ctypes.c_char_p(old.encode()))
    system_call(_PIVOT_ROOT[MACHINE], *paths, what="a new root folder")


def detach(target: str) -> None:
    """Detach a mount, with all below it."""
    checked(_libc.umount2(target.encode(), DETACH), f"unmounting {target}")


def control(option: int, argument: int = 0, pointer: object = None) -> None:
    """prctl(2)."""
    value = ctypes.c_ulong(argument)
    second = pointer if pointer is not None else ctypes.c_ulong(0)
    checked(_libc.prctl(option, value, second, ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_GET_VERSION, _BELOW = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1, 2, 4, 8
TRUNCATE = 1 << 14
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file access rights of a version."""
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
READ = EXECUTE | READ_FILE | READ_FOLDER


class _Rules(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _Below(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 without it."""
    try:
        arguments = (ctypes.c_void_p(0), ctypes.c_size_t(0), ctypes.c_uint(_GET_VERSION))
        return system_call(_CREATE, *arguments, what="Landlock's version")
    except OSError:
        return 0


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """From here on this process, and all that it starts, can read, execute and write only these."""
    known = landlock_version()
    everything = _RIGHTS[max(number for number in _RIGHTS if number <= known)]
    rules = _Rules(files=everything)
    size = 8
    if known >= 4:
        rules.network, size = 3, 16  # no binding and no connecting over TCP
    if known >= 6:
        rules.scopes, size = 3, 24  # no abstract sockets and no signals to processes outside
    arguments = (ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint(0))
    handle = system_call(_CREATE, *arguments, what="a Landlock rule set")
    for paths, allowed in ((readable, READ), (writable, everything), (devices, READ_FILE | WRITE_FILE)):
        for path in paths:
            if os.path.exists(path):
                _allow(handle, path, allowed & everything)
    control(NO_NEW_PRIVILEGES, 1)
    system_call(_RESTRICT, ctypes.c_int(handle), ctypes.c_uint(0), what="Landlock")
    os.close(handle)


def _allow(handle: int, path: str, allowed: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _Below(allowed if os.path.isdir(path) else allowed & _OF_FILES, folder)
        arguments = (ctypes.c_int(handle), ctypes.c_int(_BELOW), ctypes.byref(rule), ctypes.c_uint(0))
        system_call(_ADD_RULE, *arguments, what=f"a Landlock rule for {path}")
    finally:
        os.close(folder)
