"""The kinds of isolation: what a program can access of the system; none of its processes outlives the run.

- `namespaces`: a separate root folder in memory, with the toolchains read-only and a scratch folder of limited size;
  a process namespace, no network. Needs root, or a system that lets users create namespaces.
- `landlock`: the system's own files, of which only the toolchains can be read and only the scratch folder be written.
- `none`: limits and signals alone, for throw-away machines.
"""

import contextlib
import errno
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from braidlm.evals.sandbox import kernel

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SCRATCH = "/scratch"
OLD = "/old"
INSIDE_USER = 1000
"""The user id inside a user namespace: not 0, so that executing a file drops all capabilities."""


class Isolation:
    """`none`, and the base class of the others."""

    def __init__(self, job: dict[str, Any]):
        self.job = job
        self.user: int | None = job["user"] if os.geteuid() == 0 else None
        """The user id of a program where the launcher is root: unique, so that its processes can be counted."""
        self.scratch = ""

    def enter(self) -> None:
        """Called in the launcher, before anything is started."""
        kernel.control(kernel.ADOPT_ORPHANS, 1)
        self.scratch = tempfile.mkdtemp(dir=self.job["scratch"])
        if self.user is not None:
            os.chown(self.scratch, self.user, self.user)
            os.chmod(self.job["scratch"], 0o711)

    def set_up(self) -> None:
        """Called in the process that starts the steps."""
        _write_files(self.scratch, self.job["files"], self.user)

    def hide_processes(self) -> None:
        """Called in the process of a program whose tests are in another: it must not find that in /proc."""

    def restrict(self) -> None:
        """Called in the program's own process, right before it begins."""
        if self.user is not None:
            _switch_user(self.user)
        kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)

    def kill_all(self, starter: int) -> None:
        """Kill all descendants of the launcher, which adopts orphans; they are stopped first, as they might fork."""
        deadline = time.monotonic() + 20
        stopped: set[int] = set()
        while time.monotonic() < deadline and (new := _descendants(os.getpid()) - stopped):
            _signal(new, signal.SIGSTOP)
            stopped |= new
        with contextlib.suppress(ChildProcessError):  # raised when none is left
            while time.monotonic() < deadline:
                _signal(_descendants(os.getpid()), signal.SIGKILL)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                time.sleep(0.001)
        delete(self.scratch)

    def disk_limit_exceeded(self) -> str | None:
        """Which limit of the scratch folder is exceeded, where no file system enforces them."""
        largest = max(step["file_size"] for step in self.job["steps"])
        unnamed = unnamed_bytes(_descendants(os.getpid()), self.scratch, largest)
        return exceeded(self.scratch, self.job["disk"], unnamed)

    def process_limit(self, processes: int) -> int | None:
        """The value of RLIMIT_NPROC, which counts all processes of a user; None for no limit."""
        if self.user is not None:
            return processes
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == os.geteuid():
                    processes += len(os.listdir(f"{entry.path}/task"))
        return processes


class Landlock(Isolation):
    def restrict(self) -> None:
        super().restrict()
        kernel.restrict_files(self.job["readable"], [self.scratch], DEVICES)


class Namespaces(Isolation):
    def enter(self) -> None:
        self.scratch = SCRATCH
        namespaces = kernel.NEW_PROCESSES | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_NAMES
        try:
            kernel.unshare(namespaces)
        except PermissionError:
            if self.user is not None:
                _switch_user(self.user)
                self.user = None
            maps = {"uid_map": f"{INSIDE_USER} {os.geteuid()} 1", "gid_map": f"{INSIDE_USER} {os.getegid()} 1"}
            kernel.control(kernel.MAY_BE_READ, 1)  # else a process may not write its own maps after a change of user
            kernel.unshare(kernel.NEW_USER | namespaces)
            for name, text in {"setgroups": "deny", **maps}.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)

    def set_up(self) -> None:
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
        _new_root(self.job["readable"], self.job["disk"])
        _write_files(SCRATCH, self.job["files"], self.user)

    def hide_processes(self) -> None:
        kernel.unshare(kernel.NEW_MOUNTS)
        if os.path.ismount("/proc"):
            kernel.detach("/proc")

    def restrict(self) -> None:
        if self.user is not None:
            _switch_user(self.user)

    def kill_all(self, starter: int) -> None:
        """Kill the first process of the namespace, and with it all others; the mounts vanish with the last."""
        _signal([starter], signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(starter, 0)

    def disk_limit_exceeded(self) -> str | None:
        return None  # its file system has a size and a number of inodes

    def process_limit(self, processes: int) -> int | None:
        return processes + 2  # the step runner is counted too


ISOLATIONS: dict[str, type[Isolation]] = {"namespaces": Namespaces, "landlock": Landlock, "none": Isolation}


def children(process: int) -> list[int]:
    """The processes that a process has started or adopted."""
    tasks = f"/proc/{process}/task"
    with contextlib.suppress(OSError):  # it has just ended, or the kernel was built without these lists
        return [int(child) for task in os.listdir(tasks) for child in _read(f"{tasks}/{task}/children").split()]
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(_read(f"/proc/{name}/stat").rpartition(")")[2].split()[1]) == process:
                found.append(int(name))
    return found


def _descendants(process: int) -> set[int]:
    own = children(process)
    return {*own}.union(*map(_descendants, own))


def resident_memory(process: int) -> int:
    """Bytes in memory of a process and of all of its descendants."""
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        total = int(_read(f"/proc/{process}/statm").split()[1]) * os.sysconf("SC_PAGESIZE")
    return total + sum(map(resident_memory, children(process)))


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _switch_user(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _new_root(readable: Iterable[str], disk: int) -> None:
    """A root folder in memory with only the readable files, some devices and a scratch folder."""
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.NO_SETUID, "mode=755,size=1m")
    os.chdir("/tmp")
    os.mkdir(OLD[1:])
    kernel.pivot_root(".", OLD[1:])
    os.chdir("/")
    for path in readable:
        _bind(path, kernel.READ_ONLY | kernel.NO_SETUID | kernel.NO_DEVICES)
    for path in DEVICES:
        _bind(path, kernel.READ_ONLY | kernel.NO_SETUID)
    os.mkdir("/proc", 0o755)
    flags = kernel.NO_SETUID | kernel.NO_DEVICES | kernel.NO_EXECUTION
    with contextlib.suppress(OSError):  # in a container that hides parts of /proc this is not allowed
        kernel.mount("proc", "/proc", "proc", flags | kernel.READ_ONLY)
    os.mkdir(SCRATCH)
    options = f"mode=777,size={disk},nr_inodes={MAX_ENTRIES}"
    kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, options)
    if not os.path.lexists("/tmp"):  # a toolchain may lie there
        os.symlink(SCRATCH, "/tmp")
    kernel.detach(OLD)
    os.rmdir(OLD)
    kernel.restrict_mount("/", kernel.READ_ONLY, recursive=False)


def _bind(path: str, attributes: int) -> None:
    """Bind-mount a file or folder of the old root in the new one; links stay links."""
    source = OLD + path
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT, 0o644))
    kernel.mount(source, path, None, kernel.BIND | kernel.RECURSIVE)
    kernel.restrict_mount(path, attributes)


def _write_files(folder: str, files: dict[str, str], user: int | None) -> None:
    for name, text in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    if user is not None:
        for root, _, names in os.walk(folder):
            for path in (root, *(os.path.join(root, name) for name in names)):
                os.chown(path, user, user)


MAX_ENTRIES, MAX_FOLDERS = 10_000, 1_000
"""Files and folders together, and folders alone: some file systems take milliseconds to delete one."""
_DELETION_SECONDS = 30


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """A temporary folder, deleted at the end."""
    folder = tempfile.mkdtemp(prefix="braid-")
    try:
        yield folder
    finally:
        delete(folder)


def unnamed_bytes(processes: Iterable[int], folder: str, largest: int) -> int:
    """The bytes of files that were unlinked in a folder and that processes still have open, in any of their threads; a
    file that is only mapped counts as the `largest` that there may be."""
    sizes: dict[int, int] = {}
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended, or may not be looked into
            for thread in os.listdir(f"/proc/{process}/task"):
                for entry in os.scandir(f"/proc/{process}/task/{thread}/fd"):
                    with contextlib.suppress(OSError):
                        about = os.stat(entry.path)
                        if about.st_nlink == 0 and os.readlink(entry.path).startswith(f"{folder}/"):
                            sizes[about.st_ino] = about.st_blocks * 512
        with contextlib.suppress(OSError):
            for line in _read(f"/proc/{process}/maps").splitlines():
                if line.endswith(" (deleted)") and f" {folder}/" in line:
                    sizes.setdefault(int(line.split()[4]), largest)
    return sum(sizes.values())


def exceeded(folder: str, max_bytes: int, size: int = 0) -> Literal["disk", "entries"] | None:
    """Which limit the folder exceeds, with what counts beside it; one that cannot be searched (too deep, no permission)
    exceeds that of entries."""
    count = folders = 0
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders += 1
                        pending.append(entry.path)
                    if count > MAX_ENTRIES or folders > MAX_FOLDERS:
                        return "entries"
                    with contextlib.suppress(FileNotFoundError):  # the program goes on while this looks
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return "entries"
    return "disk" if size > max_bytes else None


def delete(folder: str) -> None:
    """Delete a folder. Folders inside are moved to one place and emptied there one by one, so that no path is long."""
    place = tempfile.mkdtemp(prefix="braid-", dir=os.path.dirname(folder))
    names = map(str, itertools.count())
    pending = [next(names)]
    with contextlib.suppress(FileNotFoundError):  # without isolation a program may have moved it
        os.rename(folder, os.path.join(place, pending[0]))
    deadline = time.monotonic() + _DELETION_SECONDS
    with _opened(place) as at:
        while pending:
            name = pending.pop()
            try:
                os.chmod(name, 0o700, dir_fd=at)
                with _opened(name, at) as emptied:
                    for entry in list(os.scandir(emptied)):
                        if not entry.is_dir(follow_symlinks=False):
                            os.unlink(entry.name, dir_fd=emptied)
                            continue
                        os.chmod(entry.name, 0o700, dir_fd=emptied)  # only a folder that may be written can be moved
                        pending.append(next(names))
                        os.rename(entry.name, pending[-1], src_dir_fd=emptied, dst_dir_fd=at)
                os.rmdir(name, dir_fd=at)
            except OSError as error:
                if error.errno == errno.ENOTEMPTY and time.monotonic() < deadline:
                    pending.append(name)  # a program whose launcher was killed may take a moment to die
                elif error.errno != errno.ENOENT:
                    raise
    os.rmdir(place)


@contextlib.contextmanager
def _opened(folder: str, place: int | None = None) -> Iterator[int]:
    """The descriptor of a folder, which is not a link to one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
