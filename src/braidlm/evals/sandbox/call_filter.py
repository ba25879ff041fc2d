"""A seccomp filter: the system calls that a program may not make, whatever else goes wrong around it.

It is a list of denied calls rather than of allowed ones, because the runtimes of five languages need many, and it is
the second line of defence behind `isolation.py`. It denies sockets; access to other processes (signals, tracing, their
memory, their limits); mounts and namespaces; kernel interfaces with a history of holes; memory that no limit counts
(memfd, System V); and, unless a step may, new processes. Threads are always allowed.
"""

import ctypes
import errno
import os
import struct

from braidlm.evals.sandbox import kernel

_CALLS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
"""Forbidden: on x86_64, on aarch64."""
_UNKNOWN: dict[str, tuple[int, int]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "clone3": (435, 435),
}
"""Reported as not implemented, so that programs use an older call: for clone3 one whose flags the filter can see."""
_OWN_PROCESS_ONLY: dict[str, tuple[int, int]] = {"kill": (62, 129), "tgkill": (234, 131), "tkill": (200, 130)}
_LIMITS, _PAIR, _CLONE = (302, 261), (53, 199), (56, 220)
_FORKS: tuple[tuple[int, ...], tuple[int, ...]] = ((57, 58), ())

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_NAMESPACES = 0x7E020000
"""The flags of clone that make namespaces."""
_THREAD = 0x00010000
_STREAM = 1

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
    if machine == "x86_64":
        code += [_op(_AT_LEAST, _X32, 0, 1), _deny(errno.ENOSYS)]
    for numbers in _CALLS.values():
        if (number := numbers[which]) is not None:
            code += _when(number, [_deny()])
    for numbers in _UNKNOWN.values():
        code += _when(numbers[which], [_deny(errno.ENOSYS)])
    for numbers in _OWN_PROCESS_ONLY.values():
        code += _when(numbers[which], [_argument(0), _op(_EQUAL, pid, 0, 1), _op(_RETURN, _ALLOW), _deny()])
    mine = [_argument(0), _op(_EQUAL, 0, 1, 0), _op(_EQUAL, pid, 0, 1), _op(_RETURN, _ALLOW), _deny()]
    code += _when(_LIMITS[which], mine)
    stream = [_argument(1), _op(_AND, 0xF), _op(_EQUAL, _STREAM, 0, 1), _op(_RETURN, _ALLOW), _deny()]
    code += _when(_PAIR[which], stream)
    clone = [_argument(0), _op(_ANY_BIT, _NAMESPACES, 0, 1), _deny()]
    if not may_fork:
        clone += [_op(_ANY_BIT, _THREAD, 1, 0), _deny()]
        for number in _FORKS[which]:
            code += _when(number, [_deny()])
    code += _when(_CLONE[which], [*clone, _op(_RETURN, _ALLOW)])
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _when(number: int, block: list[bytes]) -> list[bytes]:
    """A block for one call; it must end with a return, since it may have loaded another value."""
    return [_op(_EQUAL, number, 0, len(block)), *block]


def _argument(index: int) -> bytes:
    """The low half of an argument; both machines are little-endian."""
    return _op(_LOAD, 16 + 8 * index)


def _deny(number: int = errno.EPERM) -> bytes:
    return _op(_RETURN, _ERROR | number)
