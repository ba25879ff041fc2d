"""A seccomp filter: the system calls that a program may not make, whatever else goes wrong around it.

It is a list of denied calls rather than of allowed ones, because the runtimes of five languages need many, and it is
the second line of defence behind `isolation.py`. It denies sockets; access to other processes (signals, tracing, their
memory, limits and priorities); modes, owners, times and attributes of files, which Landlock does not protect; mounts
and namespaces; kernel interfaces with a history of holes; memory that no limit counts (memfd, System V); and, unless a
step may, new processes. Threads are always allowed.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from braidlm.evals.sandbox import kernel

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
    semop 65 193, semctl 66 191, semtimedop 220 192, mq_open 240 180, mq_unlink 241 181
"""
"""Forbidden calls: the name, and the number on x86_64 and on aarch64, which may not have the call."""
_UNKNOWN = """
    memfd_create 319 279, memfd_secret 447 447, io_uring_setup 425 425, io_uring_enter 426 426,
    io_uring_register 427 427, io_setup 206 0, clone3 435 435, openat2 437 437
"""
"""Reported as not implemented, so that programs use another: for clone3 and openat2 one whose flags can be seen."""
_OWN_PROCESS_ONLY = "kill 62 129, tgkill 234 131, tkill 200 130"
_LIMITS, _PAIR, _CLONE = (302, 261), (53, 199), (56, 220)
_OPEN, _OPEN_AT, _FILE_CONTROL, _DEVICE_CONTROL = (2, None), (257, 56), (72, 25), (16, 29)
_FORKS: tuple[tuple[int, ...], tuple[int, ...]] = ((57, 58), ())

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
_HARMLESS_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Others set attributes of files, or signals."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def forbid_calls(may_fork: bool) -> None:
    """Install the filter for this process and all that it starts; `may_fork`: whether it may start others."""
    code = build(kernel.MACHINE, may_fork, os.getpid())
    kernel.control(kernel.NO_NEW_PRIVILEGES, 1)
    program = _Program(len(code) // 8, code)
    kernel.control(kernel.FILTER_CALLS, 2, ctypes.byref(program))


def build(machine: str, may_fork: bool, pid: int) -> bytes:
    """The filter's instructions for a machine, and for the process of this number."""
    which = kernel.SUPPORTED.index(machine)
    code = [_op(_LOAD, _ARCHITECTURE_AT), _op(_EQUAL, _ARCHITECTURE[machine], 1, 0), _op(_RETURN, _KILL)]
    code.append(_op(_LOAD, _NUMBER_AT))
    code += [_op(_AT_LEAST, _FIRST_UNKNOWN, 0, 1), _deny(errno.ENOSYS)]
    own_process = [_argument(0), _op(_EQUAL, pid, 0, 1), _op(_RETURN, _ALLOW), _deny()]
    for calls, block in ((_CALLS, [_deny()]), (_UNKNOWN, [_deny(errno.ENOSYS)]), (_OWN_PROCESS_ONLY, own_process)):
        for call in calls.split(","):
            if (number := call.split()[1 + which]) != "-":
                code += _when(int(number), block)
    mine = [_argument(0), _op(_EQUAL, 0, 1, 0), _op(_EQUAL, pid, 0, 1), _op(_RETURN, _ALLOW), _deny()]
    code += _when(_LIMITS[which], mine)
    stream = [_argument(1), _op(_AND, 0xF), _op(_EQUAL, _STREAM, 0, 1), _op(_RETURN, _ALLOW), _deny()]
    code += _when(_PAIR[which], stream)
    code += _file_rules(which)
    clone = [_argument(0), _op(_ANY_BIT, _NAMESPACES, 0, 1), _deny()]
    if not may_fork:
        clone += [_op(_ANY_BIT, _THREAD, 1, 0), _deny()]
        for fork in _FORKS[which]:
            code += _when(fork, [_deny()])
    code += _when(_CLONE[which], [*clone, _op(_RETURN, _ALLOW)])
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def _file_rules(which: int) -> list[bytes]:
    """What may not be done to files that can only be read."""
    allow, code = _op(_RETURN, _ALLOW), []
    for position, number in ((1, _OPEN[which]), (2, _OPEN_AT[which])):
        if number is not None:  # Landlock before Linux 6.2 lets a file that may be read be truncated when it is opened
            flags = [_argument(position), _op(_AND, _ACCESS_MODE | _TRUNCATES)]
            code += _when(number, [*flags, _op(_EQUAL, _TRUNCATES, 0, 1), _deny(), allow])
    code += _when(_FILE_CONTROL[which], [_argument(1), *_among(_DENIED_FCNTLS, _deny(), allow)])
    code += _when(_DEVICE_CONTROL[which], [_argument(1), *_among(_HARMLESS_IOCTLS, allow, _deny(errno.ENOTTY))])
    return code


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _when(number: int, block: list[bytes]) -> list[bytes]:
    """A block for one call; it must end with a return, since it may have loaded another value."""
    return [_op(_EQUAL, number, 0, len(block)), *block]


def _among(values: Sequence[int], if_one: bytes, if_none: bytes) -> list[bytes]:
    """Return one thing if the loaded value is among these, and another if it is not."""
    return [*(_op(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)), if_none, if_one]


def _argument(index: int) -> bytes:
    """The low half of an argument; both machines are little-endian."""
    return _op(_LOAD, 16 + 8 * index)


def _deny(number: int = errno.EPERM) -> bytes:
    return _op(_RETURN, _ERROR | number)
