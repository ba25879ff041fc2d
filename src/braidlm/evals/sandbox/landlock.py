"""Landlock: a process gives up access to all files but those named; unprivileged, since Linux 5.13 (2021)."""

import ctypes
import os
from collections.abc import Iterable

from braidlm.evals.sandbox import kernel

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


def version() -> int:
    """The kernel's version of Landlock; 0 without it."""
    try:
        arguments = (ctypes.c_void_p(0), ctypes.c_size_t(0), ctypes.c_uint(_GET_VERSION))
        return kernel.system_call(_CREATE, *arguments, what="Landlock's version")
    except OSError:
        return 0


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """From here on this process, and all that it starts, can read, execute and write only these."""
    known = version()
    everything = _RIGHTS[max(number for number in _RIGHTS if number <= known)]
    rules = _Rules(files=everything)
    size = 8
    if known >= 4:
        rules.network, size = 3, 16  # no binding and no connecting over TCP
    if known >= 6:
        rules.scopes, size = 3, 24  # no abstract sockets and no signals to processes outside
    arguments = (ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint(0))
    handle = kernel.system_call(_CREATE, *arguments, what="a Landlock rule set")
    for paths, allowed in (
        (readable, READ),
        (writable, everything),
        (devices, READ_FILE | WRITE_FILE),
    ):
        for path in paths:
            if os.path.exists(path):
                _allow(handle, path, allowed & everything)
    kernel.control(kernel.NO_NEW_PRIVILEGES, 1)
    kernel.system_call(_RESTRICT, ctypes.c_int(handle), ctypes.c_uint(0), what="Landlock")
    os.close(handle)


def _allow(handle: int, path: str, allowed: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _Below(allowed if os.path.isdir(path) else allowed & _OF_FILES, folder)
        arguments = (ctypes.c_int(handle), ctypes.c_int(_BELOW), ctypes.byref(rule), ctypes.c_uint(0))
        kernel.system_call(_ADD_RULE, *arguments, what=f"a Landlock rule for {path}")
    finally:
        os.close(folder)
