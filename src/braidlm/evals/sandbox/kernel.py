"""Linux system calls without a function in Python: namespaces, mounts, and two restrictions of a process.

Landlock restricts the files that a process can reach. A seccomp filter restricts its system calls, whatever else goes
wrong around it. It is a list of denied calls rather than of allowed ones, because the runtimes of five languages need
many, and it is the second line of defence behind `isolation.py`. It denies sockets; access to other processes (signals,
tracing, their memory, limits and priorities); modes, owners, times and attributes of files, which Landlock does not
protect; locks of files; mounts and namespaces; kernel interfaces with a history of holes; memory and files that no
limit counts (memfd, System V, descriptors on their way); and, unless a step may, new processes. Threads are always
allowed. What a filter cannot see is the path of a call: under Landlock alone `stat`, `readlink` and `uname` stay.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MACHINE = platform.machine()
SUPPORTED = ("x86_64", "aarch64")
"""Machines whose system call numbers are in this file; both are little-endian and have 64 bits."""

NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXECUTION, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
DIE_WITH_PARENT, MAY_BE_READ, FILTER_CALLS, ADOPT_ORPHANS, NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_DETACH, _AT_HERE, _AT_RECURSIVE = 2, -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _CREATE_RULES, _ADD_RULE, _RESTRICT_SELF = 442, 444, 445, 446

_libc: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None  # Windows imports this file too


def _call(function: Callable[..., int], *arguments: int | str | bytes | None, what: str) -> int:
    """The result of a function of C; or an OSError that says what it was for."""
    texts = (each.encode() if isinstance(each, str) else each for each in arguments)
    result = function(*(ctypes.c_long(each) if isinstance(each, int) else each for each in texts))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} ({what})")
    return result


def unshare(namespaces: int) -> None:
    """Leave the namespaces of the parent."""
    _call(_libc.unshare, namespaces, what="new namespaces")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    _call(_libc.mount, source, target, kind, flags, options, what=f"mounting {target}")


def restrict_mount(target: str, attributes: int, recursive: bool = True) -> None:
    """Make a mount, and those below it, read-only or less: mount_setattr(2), of Linux 5.12."""
    change, below = struct.pack("=4Q", attributes, 0, 0, 0), _AT_RECURSIVE if recursive else 0
    arguments = (_MOUNT_SETATTR, _AT_HERE, target, below, change, len(change))
    _call(_libc.syscall, *arguments, what=f"restricting {target}")


def pivot_root(new: str, old: str) -> None:
    """The folder `new` becomes /, and the old / becomes its folder `old`."""
    _call(_libc.syscall, _PIVOT_ROOT[MACHINE], new, old, what="a new root folder")


def detach(target: str) -> None:
    """Detach a mount, with all below it."""
    _call(_libc.umount2, target, _DETACH, what=f"unmounting {target}")


def control(option: int, argument: int = 0, structure: bytes | None = None) -> None:
    """prctl(2)."""
    _call(_libc.prctl, option, argument, structure, 0, 0, what=f"prctl {option}")


_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE = 1, 2, 4, 8, 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file access rights of a version of Landlock."""


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 without it."""
    try:
        return _call(_libc.syscall, _CREATE_RULES, None, 0, 1, what="Landlock's version")
    except OSError:
        return 0


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """From here on this process, and all that it starts, can read, execute and write only these."""
    version = landlock_version()
    everything = _RIGHTS[max(number for number in _RIGHTS if number <= version)]
    # No binding and no connecting over TCP; no abstract sockets and no signals to processes outside.
    rules = struct.pack("=3Q", everything, 3, 3)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    handle = _call(_libc.syscall, _CREATE_RULES, rules, len(rules), 0, what="a Landlock rule set")
    read, use = _EXECUTE | _READ_FILE | _READ_FOLDER, _READ_FILE | _WRITE_FILE
    for paths, allowed in ((readable, read), (writable, everything), (devices, use)):
        for path in filter(os.path.exists, paths):
            entry = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", everything & allowed & (-1 if os.path.isdir(path) else _OF_FILES), entry)
            _call(_libc.syscall, _ADD_RULE, handle, 1, rule, 0, what=f"a Landlock rule for {path}")
            os.close(entry)
    control(NO_NEW_PRIVILEGES, 1)
    _call(_libc.syscall, _RESTRICT_SELF, handle, 0, what="Landlock")
    os.close(handle)


_CALLS = """
    socket 41 198, connect 42 203, bind 49 200, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,
    pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424, process_madvise 440 440,
    process_mrelease 448 448, kcmp 312 272, migrate_pages 256 238, move_pages 279 239, setpriority 141 140,
    ioprio_set 251 30, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
    sched_setattr 314 274, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, chmod 90 -, fchmod 91 52,
    fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -,
    utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
    setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466,
    file_setattr 469 469, truncate 76 45, inotify_init 253 -, inotify_init1 294 26, mount 165 40, umount2 166 39,
    pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431,
    fsmount 432 432, fspick 433 433, mount_setattr 442 442, open_tree_attr 467 467, statmount 457 457,
    listmount 458 458, unshare 272 97, setns 308 268, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
    keyctl 250 219, add_key 248 217, request_key 249 218, kexec_load 246 104, kexec_file_load 320 294,
    init_module 175 105, finit_module 313 273, delete_module 176 106, reboot 169 142, swapon 167 224, swapoff 168 225,
    acct 163 89, quotactl 179 60, quotactl_fd 443 443, vhangup 153 58, modify_ldt 154 -, syslog 103 116,
    settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, sethostname 170 161,
    setdomainname 171 162, iopl 172 -, ioperm 173 -, open_by_handle_at 304 265, fanotify_init 300 262, shmget 29 194,
    shmat 30 196, shmctl 31 195, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, semget 64 190,
    semop 65 193, semctl 66 191, semtimedop 220 192, mq_open 240 180, mq_unlink 241 181, sendmsg 46 211,
    sendmmsg 307 269
"""
"""Forbidden calls: the name, and the number on x86_64 and on aarch64, which may not have the call."""
_UNKNOWN = """
    memfd_create 319 279, memfd_secret 447 447, io_uring_setup 425 425, io_uring_enter 426 426,
    io_uring_register 427 427, io_setup 206 0, clone3 435 435, openat2 437 437
"""
"""Reported as not implemented, so that programs use another: for clone3 and openat2 one whose flags can be seen."""
_UNSUPPORTED = """
    getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13,
    getxattrat 464 464, listxattrat 465 465, file_getattr 468 468
"""
"""Reported as not supported by the file system: programs that copy files go on without attributes."""
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FIRST_UNKNOWN = 470
"""Calls of later kernels (Linux 6.17 ends before it), and on x86_64 those of its x32 mode, are not implemented."""
_NAMESPACES = 0x7E020000
"""The flags of clone that make namespaces."""
_THREAD = 0x00010000
_STREAM = 1
_ACCESS_MODE, _TRUNCATES = 0o3, 0o1000
_DENIED_FCNTLS = (8, 10, 15, 1026, 1024)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX and F_NOTIFY make the kernel send signals to any process of the user; F_SETLEASE
makes others wait who open the file."""
_LOCKS = (6, 7, 37, 38)
"""F_SETLK and F_SETLKW, and those of open files, succeed without a lock, as flock does: a lock on a tool would make
others wait, and a runtime that locks its own files (Go's cache) is alone with them."""
_NOT_DUMPABLE = 4
"""prctl's option by which a process hides its open files from the limit on disk."""
_HARMLESS_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Others set attributes of files, or signals."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


def forbid_calls(may_fork: bool) -> None:
    """Install the filter for this process and all that it starts; `may_fork`: whether it may start others."""
    code = filter_code(MACHINE, may_fork, os.getpid())
    instructions = ctypes.create_string_buffer(code)
    control(NO_NEW_PRIVILEGES, 1)
    control(FILTER_CALLS, 2, struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions)))


def filter_code(machine: str, may_fork: bool, pid: int) -> bytes:
    """The filter's instructions for a machine, and for the process of this number."""
    allow, deny, unknown = (_op(_RETURN, value) for value in (_ALLOW, _ERROR | errno.EPERM, _ERROR | errno.ENOSYS))
    unsupported, granted = (_op(_RETURN, _ERROR | number) for number in (errno.ENOTSUP, 0))
    no_such_device_call = _op(_RETURN, _ERROR | errno.ENOTTY)
    own_process = [_argument(0), _op(_EQUAL, pid, 0, 1), allow, deny]
    stream = [_argument(1), _op(_AND, 0xF), _op(_EQUAL, _STREAM, 0, 1), allow, deny]
    # Landlock before Linux 6.2 lets a file that may be read be truncated when it is opened.
    truncating = [_op(_AND, _ACCESS_MODE | _TRUNCATES), _op(_EQUAL, _TRUNCATES, 0, 1), deny, allow]
    locks = [part for lock in _LOCKS for part in (_op(_EQUAL, lock, 0, 1), granted)]
    thread = [] if may_fork else [_op(_ANY_BIT, _THREAD, 1, 0), deny]
    rules = [
        (_CALLS, [deny]),
        (_UNKNOWN, [unknown]),
        (_UNSUPPORTED, [unsupported]),
        ("flock 73 32", [granted]),
        ("prctl 157 167", [_argument(0), _op(_EQUAL, _NOT_DUMPABLE, 0, 1), deny, allow]),
        ("kill 62 129, tgkill 234 131, tkill 200 130", own_process),
        ("prlimit64 302 261", [_argument(0), _op(_EQUAL, 0, 1, 0), *own_process[1:]]),
        ("socketpair 53 199", stream),
        ("open 2 -", [_argument(1), *truncating]),
        ("openat 257 56", [_argument(2), *truncating]),
        ("fcntl 72 25", [_argument(1), *locks, *_among(_DENIED_FCNTLS, deny, allow)]),
        ("ioctl 16 29", [_argument(1), *_among(_HARMLESS_IOCTLS, allow, no_such_device_call)]),
        ("fork 57 -, vfork 58 -", [allow if may_fork else deny]),
        ("clone 56 220", [_argument(0), _op(_ANY_BIT, _NAMESPACES, 0, 1), deny, *thread, allow]),
    ]
    code = [_op(_LOAD, _ARCHITECTURE_AT), _op(_EQUAL, _ARCHITECTURE[machine], 1, 0), _op(_RETURN, _KILL)]
    code += [_op(_LOAD, _NUMBER_AT), _op(_AT_LEAST, _FIRST_UNKNOWN, 0, 1), unknown]
    for calls, block in rules:  # a block ends with a return, since it may have loaded another value
        for call in calls.split(","):
            if (number := call.split()[1 + SUPPORTED.index(machine)]) != "-":
                code += [_op(_EQUAL, int(number), 0, len(block)), *block]
    return b"".join([*code, allow])


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _argument(index: int) -> bytes:
    """Load the low half of an argument."""
    return _op(_LOAD, _ARGUMENTS_AT + 8 * index)


def _among(values: Sequence[int], if_one: bytes, if_none: bytes) -> list[bytes]:
    """Return one thing if the loaded value is among these, and another if it is not."""
    return [*(_op(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)), if_none, if_one]
