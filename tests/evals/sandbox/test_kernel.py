"""The filter of system calls, read instruction by instruction as the kernel does, on both kinds of machine."""

import errno
import struct

import pytest

from braidlm.evals.sandbox import kernel

ALLOW, KILL, GRANTED = "allow", "kill", "granted"
UNSUPPORTED = errno.errorcode[errno.ENOTSUP]
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PID = 4321
THREAD = 0x00010000 | 0x00000100 | 0x00000800
SIGCHLD = 17


def verdict(machine: str, number: int, *arguments: int, may_fork: bool = False, arch: int | None = None) -> str:
    """What the filter says of a call: the instructions of classic BPF that it uses, and no others."""
    code = kernel.filter_code(machine, may_fork, PID)
    assert len(code) % 8 == 0
    program = [struct.unpack("=HBBI", code[at : at + 8]) for at in range(0, len(code), 8)]
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, arch or ARCHITECTURES[machine], 0, *padded)
    loaded, at = 0, 0
    while True:
        kind, if_true, if_false, value = program[at]
        at += 1
        if kind == 0x20:
            loaded = struct.unpack("=I", data[value : value + 4])[0]
        elif kind == 0x54:
            loaded &= value
        elif kind == 0x06:
            known = {0x7FFF0000: ALLOW, 0x80000000: KILL, 0x00050000: GRANTED}
            return known.get(value) or errno.errorcode[value & 0xFFFF]
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[kind]
            at += if_true if holds else if_false


CALLS = {
    "x86_64": {"read": 0, "openat": 257, "execve": 59, "mmap": 9, "futex": 202, "exit_group": 231, "pipe2": 293}
    | {"socket": 41, "connect": 42, "ptrace": 101, "mount": 165, "unshare": 272, "setns": 308, "bpf": 321}
    | {"memfd_create": 319, "io_uring_setup": 425, "clone3": 435, "clone": 56, "kill": 62, "tgkill": 234}
    | {"prlimit64": 302, "socketpair": 53, "shmget": 29, "init_module": 175, "pidfd_send_signal": 424}
    | {"fchmod": 91, "fchmodat": 268, "fchownat": 260, "utimensat": 280, "setxattr": 188, "fremovexattr": 199}
    | {"setpriority": 141, "sched_setaffinity": 203, "ioprio_set": 251, "shmat": 30, "truncate": 76}
    | {"openat2": 437, "io_setup": 206, "fcntl": 72, "ioctl": 16, "getxattr": 191, "flistxattr": 196, "flock": 73}
    | {"sendmsg": 46, "sendmmsg": 307, "prctl": 157},
    "aarch64": {"read": 63, "openat": 56, "execve": 221, "mmap": 222, "futex": 98, "exit_group": 94, "pipe2": 59}
    | {"socket": 198, "connect": 203, "ptrace": 117, "mount": 40, "unshare": 97, "setns": 268, "bpf": 280}
    | {"memfd_create": 279, "io_uring_setup": 425, "clone3": 435, "clone": 220, "kill": 129, "tgkill": 131}
    | {"prlimit64": 261, "socketpair": 199, "shmget": 194, "init_module": 105, "pidfd_send_signal": 424}
    | {"fchmod": 52, "fchmodat": 53, "fchownat": 54, "utimensat": 88, "setxattr": 5, "fremovexattr": 16}
    | {"setpriority": 140, "sched_setaffinity": 122, "ioprio_set": 30, "shmat": 196, "truncate": 45}
    | {"openat2": 437, "io_setup": 0, "fcntl": 25, "ioctl": 29, "getxattr": 8, "flistxattr": 13, "flock": 32}
    | {"sendmsg": 211, "sendmmsg": 269, "prctl": 167},
}
"""From the kernel's tables."""


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_what_is_allowed_and_what_is_not(machine: str) -> None:
    calls = CALLS[machine]
    for name in ("read", "openat", "execve", "mmap", "futex", "exit_group", "pipe2"):
        assert verdict(machine, calls[name]) == ALLOW, name
    for name in ("socket", "connect", "ptrace", "mount", "unshare", "setns", "bpf", "shmget", "init_module"):
        assert verdict(machine, calls[name]) == "EPERM", name
    for name in ("memfd_create", "io_uring_setup", "clone3", "openat2", "io_setup"):
        assert verdict(machine, calls[name]) == "ENOSYS", name
    assert verdict(machine, calls["pidfd_send_signal"]) == "EPERM"


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_what_landlock_does_not_protect(machine: str) -> None:
    calls = CALLS[machine]
    for name in ("fchmod", "fchmodat", "fchownat", "utimensat", "setxattr", "fremovexattr", "truncate"):
        assert verdict(machine, calls[name]) == "EPERM", name
    for name in ("getxattr", "flistxattr"):
        assert verdict(machine, calls[name]) == UNSUPPORTED, name
    for name in ("setpriority", "sched_setaffinity", "ioprio_set", "shmat", "sendmsg", "sendmmsg"):
        assert verdict(machine, calls[name]) == "EPERM", name


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_files_are_truncated_only_by_those_who_may_write(machine: str) -> None:
    read, write, both, truncate, create = 0, 1, 2, 0o1000, 0o100
    for flags in (read, create, write | truncate, both | truncate | create):
        assert verdict(machine, CALLS[machine]["openat"], 0, 0, flags) == ALLOW
    assert verdict(machine, CALLS[machine]["openat"], 0, 0, read | truncate) == "EPERM"


def test_the_older_open_of_x86() -> None:
    assert verdict("x86_64", 2, 0, 0o1000) == "EPERM"
    assert verdict("x86_64", 2, 0, 0o1001) == ALLOW


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_descriptors_send_no_signals_and_set_no_attributes(machine: str) -> None:
    get_flags, set_owner, set_signal, lease = 3, 8, 10, 1024
    assert verdict(machine, CALLS[machine]["fcntl"], 1, get_flags) == ALLOW
    for command in (set_owner, set_signal, 15, 1026, lease):
        assert verdict(machine, CALLS[machine]["fcntl"], 1, command) == "EPERM"
    for request in (0x5401, 0x541B, 0x5421, 0x5451):
        assert verdict(machine, CALLS[machine]["ioctl"], 1, request) == ALLOW
    for request in (0x40086602, 0x401C5820, 0x8901, 0x5412):
        assert verdict(machine, CALLS[machine]["ioctl"], 1, request) == "ENOTTY"


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_locks_are_granted_and_not_taken(machine: str) -> None:
    assert verdict(machine, CALLS[machine]["flock"], 3, 2) == GRANTED
    for command in (6, 7, 37, 38):
        assert verdict(machine, CALLS[machine]["fcntl"], 3, command) == GRANTED
    for command in (5, 36):
        assert verdict(machine, CALLS[machine]["fcntl"], 3, command) == ALLOW


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_no_process_hides_its_files(machine: str) -> None:
    assert verdict(machine, CALLS[machine]["prctl"], 4, 0) == "EPERM"
    for option in (1, 3, 15, 22, 38):
        assert verdict(machine, CALLS[machine]["prctl"], option) == ALLOW


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_calls_of_later_kernels_do_not_exist(machine: str) -> None:
    assert verdict(machine, 469) == "EPERM"
    for number in (470, 1000, 0x40000000 | 41):
        assert verdict(machine, number) == "ENOSYS"


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_a_process_reaches_only_itself(machine: str) -> None:
    calls = CALLS[machine]
    for name in ("kill", "tgkill"):
        assert verdict(machine, calls[name], PID, 9) == ALLOW
        for other in (1, 0, PID + 1, 2**32 - 1):
            assert verdict(machine, calls[name], other, 9) == "EPERM"
    assert verdict(machine, calls["prlimit64"], 0) == ALLOW
    assert verdict(machine, calls["prlimit64"], PID) == ALLOW
    assert verdict(machine, calls["prlimit64"], 1) == "EPERM"


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_threads_but_no_processes_and_no_namespaces(machine: str) -> None:
    clone = CALLS[machine]["clone"]
    assert verdict(machine, clone, THREAD) == ALLOW
    assert verdict(machine, clone, SIGCHLD) == "EPERM"
    assert verdict(machine, clone, SIGCHLD, may_fork=True) == ALLOW
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, clone, SIGCHLD | flag, may_fork=True) == "EPERM"
        assert verdict(machine, clone, THREAD | flag) == "EPERM"


def test_forks_of_x86() -> None:
    for number in (57, 58):
        assert verdict("x86_64", number) == "EPERM"
        assert verdict("x86_64", number, may_fork=True) == ALLOW


@pytest.mark.parametrize("machine", kernel.SUPPORTED)
def test_pairs_of_sockets_are_streams(machine: str) -> None:
    pair, local, close_on_exec = CALLS[machine]["socketpair"], 1, 0o2000000
    assert verdict(machine, pair, local, 1 | close_on_exec) == ALLOW
    assert verdict(machine, pair, local, 2 | close_on_exec) == "EPERM"


def test_other_ways_to_call() -> None:
    assert verdict("x86_64", 0, arch=0x40000003) == KILL, "the calls of 32 bits have other numbers"
