"""The sandbox's interface: programs in, outcomes out.

`Sandbox.open` chooses the best isolation of this system, tests it with a program that attempts what must not be
possible, and refuses to run anything if one attempt succeeds.
"""

import contextlib
import glob
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from braidlm.core.errors import BraidError
from braidlm.evals.sandbox import kernel
from braidlm.evals.sandbox.isolation import MAX_ENTRIES, MAX_FOLDERS, scratch_folder

IsolationPolicy = Literal["required", "best"]
MEGABYTE = 1 << 20
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/openssl.cnf"),
)
"""The files that programs need to run; no settings, no users, no homes."""
USERS = range(60_000, 65_000)
"""User ids of programs where Braid is root: rarely in use, and different ones, so that processes can be counted."""
_program_numbers = itertools.count(os.getpid())
ADDED_SECONDS = 60
"""How much longer than the steps' limits a launcher may take before it counts as broken."""


@dataclass(frozen=True)
class Limits:
    seconds: int = 3
    """Seconds of processor time."""
    wall: float = 10.0
    """Seconds by the clock."""
    memory: int = 1024 * MEGABYTE
    memory_is_watched: bool = False
    """For runtimes that reserve far more address space than they use: resident memory is polled instead."""
    may_fork: bool = False
    """Whether it may start processes; threads are always allowed."""
    processes: int = 32
    """Processes and threads together."""
    open_files: int = 64
    file_size: int = 16 * MEGABYTE
    output: int = MEGABYTE
    """Bytes that may be printed."""


@dataclass(frozen=True)
class Step:
    """One command, which begins with an absolute path; `{scratch}` is the folder of the files."""

    command: Sequence[str]
    limits: Limits = field(default_factory=Limits)
    environment: dict[str, str] = field(default_factory=dict)
    input: str = ""
    tests: str = ""
    """The text on the standard input of a second process, of the same command and limits: it tests the first.

    The two speak by their descriptors 3 (to read) and 4 (to write). The step's outcome and its output are those of the
    tests, and no descriptor of the program leads there.
    """


@dataclass(frozen=True)
class Program:
    """Files, and steps that run one after another in their folder, while they exit with 0."""

    files: dict[str, str]
    steps: Sequence[Step]
    disk: int = 64 * MEGABYTE
    """The maximum total size of all files."""


@dataclass(frozen=True)
class Outcome:
    reason: str
    """Why it failed; empty if every step exited with 0 within its limits."""
    out: str = ""
    """The end of the last step's output."""
    err: str = ""
    steps: int = 0
    """How many were run."""


@dataclass(frozen=True)
class Sandbox:
    """A kind of isolation that passed its test."""

    isolation: str
    filter: bool
    readable: tuple[str, ...]
    failures: tuple[str, ...] = ()
    """The attempts that it does not prevent: none, unless the policy is `best`."""

    @classmethod
    def open(cls, policy: IsolationPolicy = "required", toolchains: Iterable[str] = ()) -> "Sandbox":
        """The best isolation of this system, in which programs can read these toolchains; or an error with reasons."""
        if sys.platform != "linux":
            what = f"programs that a model wrote are run on Linux only, and this is {sys.platform}"
            raise BraidError(what, "code execution", "Evaluate in a Linux container or virtual machine.")
        readable = tuple(_readable(toolchains))
        problems: list[str] = []
        usable: list[Sandbox] = []
        for isolation, filtered in (("namespaces", True), ("landlock", True), ("none", True), ("none", False)):
            if isolation == "none" and policy == "required":
                what = f"this system offers no way to isolate programs ({'; '.join(problems)})"
                todo = (
                    "Run on a system with user namespaces or Landlock (Linux 5.13), or as root in a virtual machine. "
                )
                todo += "In a throw-away machine without secrets, code_isolation=best runs programs with what there is."
                raise BraidError(what, "code execution", todo)
            failures, problem = _tested(sandbox := cls(isolation, filtered, readable))
            problems.append(f"{isolation}: {problem or 'does not prevent ' + ', '.join(failures)}")
            if problem is None:
                usable.append(replace(sandbox, failures=tuple(failures)))
                if isolation == "none" or not failures:
                    break
        if not usable:
            raise BraidError(f"programs cannot be run on this system ({problem})", "code execution")
        return min(usable, key=lambda sandbox: len(sandbox.failures))

    @property
    def name(self) -> str:
        """The kernel's mechanisms that are in use."""
        mechanisms = [*_MECHANISMS[self.isolation], *(["seccomp"] if self.filter else []), "limits"]
        return " and ".join([", ".join(mechanisms[:-1]), mechanisms[-1]]) if mechanisms[:-1] else "limits alone"

    @property
    def statement(self) -> list[str]:
        """What is enforced on this system."""
        lines = [f"isolation: {self.name}", *_STATEMENTS[self.isolation]]
        if self.filter:
            lines.append(
                "system calls: no sockets, no signals to others, no tracing, no mounts, no modes, no locks (seccomp)"
            )
        lines.append("limits on processor time, time, memory, processes, open files, file sizes and output")
        if self.failures:
            lines.append(f"NOT prevented: {', '.join(self.failures)}")
        return lines

    def run(self, program: Program) -> Outcome:
        """Run one program; returns when all of its processes and files are gone."""
        with contextlib.nullcontext() if self.isolation == "namespaces" else scratch_folder() as scratch:
            job = {
                "isolation": self.isolation,
                "filter": self.filter,
                "readable": self.readable,
                "user": USERS[next(_program_numbers) % len(USERS)],
                "scratch": scratch,
                "files": program.files,
                "disk": program.disk,
                "steps": [asdict(step.limits) | asdict(step) for step in program.steps],
            }
            steps = _launch(job, sum(step.limits.wall for step in program.steps) + ADDED_SECONDS)
        reason = _reason(steps[-1], program.steps[len(steps) - 1].limits, program.disk)
        return Outcome(reason, steps[-1]["out"], steps[-1]["err"], len(steps))

    def run_all(self, programs: Sequence[Program]) -> list[Outcome]:
        """Run many programs, as many at once as there are processors; outcomes are in their order."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(self.run, programs))  # after an error those that have not begun are cancelled


_MECHANISMS = {"namespaces": ["namespaces"], "landlock": ["Landlock"], "none": []}
_STATEMENTS = {
    "namespaces": (
        "files: its own root folder, with toolchains read-only, a scratch folder and nothing else (mount namespace)",
        "network: none (network namespace)",
        "processes: it sees only its own, and all are killed at the end (process namespace)",
    ),
    "landlock": (
        "files: toolchains read-only, a scratch folder on disk and nothing else (Landlock)",
        "processes: all are killed at the end; no signals to others",
        "NOT hidden: whether a file is there, its size and times, where links lead, and the host's name",
        "recommended: namespaces, which hide these too (as root, or where users may create namespaces)",
    ),
    "none": ("files and network: NOT isolated", "processes: all are killed at the end"),
}


def _tested(sandbox: Sandbox) -> tuple[list[str], str | None]:
    """What a program that tries everything can do in this sandbox, and why the sandbox cannot be used at all."""
    if sandbox.filter and kernel.MACHINE not in kernel.SUPPORTED:
        return [], f"its system calls on {kernel.MACHINE} are not known"
    if sandbox.isolation == "landlock" and kernel.landlock_version() == 0:
        return [], "the kernel has none"
    home = None
    with contextlib.suppress(OSError):  # a file of the user that no program should see
        files = (str(path) for path in sorted(Path.home().iterdir()) if path.is_file())
        home = next((file for file in files if not file.startswith(sandbox.readable)), None)
    with tempfile.TemporaryDirectory(prefix="braid-") as folder:
        os.chmod(folder, 0o755)
        canary = Path(folder) / "canary"
        canary.write_text("a bird")
        canary.chmod(0o666)
        mode = canary.stat().st_mode
        probe = _PROBE.format(arguments=(str(canary), home, os.getpid()))
        step = Step([python(), "-I", "-S", "{scratch}/probe.py"], Limits(wall=20))
        try:
            outcome = sandbox.run(Program({"probe.py": probe}, [step]))
            succeeded = json.loads(outcome.out)
        except BraidError as error:
            return [], error.what
        except ValueError:
            return [], f"Python does not run in it ({outcome.reason})"
        if canary.read_text() != "a bird" or len(list(Path(folder).iterdir())) > 1:
            succeeded.append("write")
        if canary.stat().st_mode != mode:
            succeeded.append("mode")
    return list(dict.fromkeys(ATTEMPTS[name] for name in succeeded if name in ATTEMPTS)), None


def python() -> str:
    """The interpreter itself, not a link to it in a virtual environment."""
    return os.path.realpath(sys.executable)


def _readable(toolchains: Iterable[str]) -> list[str]:
    """The system, Python, and the folders of the toolchains that lie elsewhere; none of them inside another."""
    candidates = [*SYSTEM, *sorted(glob.glob("/etc/java-*"))]
    candidates += map(os.path.realpath, (sys.base_prefix, *toolchains))
    readable: list[str] = []
    for path in filter(os.path.lexists, candidates):
        if not any(path == other or path.startswith(other.rstrip("/") + "/") for other in readable):
            readable.append(path)
    return readable


def _launch(job: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Run a launcher; it and all of its descendants are gone when this returns the reports of the steps."""
    source = Path(__file__).parents[3]
    start = "import sys; sys.path.insert(0, sys.argv[1]); from braidlm.evals.sandbox.launcher import main; main()"
    words, pipe = [python(), "-I", "-S", "-B", "-c", start, str(source)], subprocess.PIPE
    launcher = subprocess.Popen(
        words, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace", env={}, start_new_session=True
    )
    try:
        out, err = launcher.communicate(json.dumps(job), timeout)
        report = json.loads(out)
    except ValueError:
        last = err.strip().splitlines()[-1:] or [f"its launcher ended with {launcher.returncode}"]
        report = {"broken": last[0]}
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        report = {"broken": f"it did not end within {timeout:g} seconds"}
    if report["broken"]:
        raise BraidError(f"the sandbox broke down: {report['broken']}", "code execution")
    return report["steps"]


def _error_line(text: str) -> str:
    """The line with the error: the last; for Node, which ends with a trace and its version, the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[-1].startswith("Node.js v"):
        lines = [line for line in lines if re.match(r"(Uncaught )?\w*Error\b", line)] or lines[:-1]
    return lines[-1][:200] if lines else ""


def _reason(step: dict[str, Any], limits: Limits, disk: int) -> str:
    """Why a step failed, in one line."""
    if step["stopped"]:
        reasons = {
            "wall": f"took longer than {limits.wall:g} seconds",
            "memory": f"used more than {limits.memory // MEGABYTE:,} MB of memory",
            "disk": f"wrote more than {disk // MEGABYTE:,} MB of files",
            "entries": f"made more than {MAX_ENTRIES:,} files or {MAX_FOLDERS:,} folders, or nested them too deeply",
            "output": f"printed more than {limits.output:,} bytes",
        }
        return reasons[step["stopped"]]
    code, cpu = step["code"], step["cpu"] or 0
    tested = step["program"]
    if tested and tested["code"] < 0 and (tested["code"] != -signal.SIGKILL or _used_up(tested["cpu"], limits)):
        code, cpu = tested["code"], tested["cpu"]  # otherwise it was killed when its tests had ended
    if code == 0:
        return ""
    if code in (-signal.SIGXCPU, -signal.SIGKILL) and _used_up(cpu, limits):
        return f"used more than {limits.seconds} seconds of processor time"
    if code == -signal.SIGXFSZ:
        return f"wrote a file larger than {limits.file_size // MEGABYTE:,} MB"
    detail = f": {line}" if (line := _error_line(step["err"] or step["out"])) else ""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}{detail}"
    return f"ended with {code}{detail}"


def _used_up(cpu: float, limits: Limits) -> bool:
    return cpu >= limits.seconds - 0.1


ATTEMPTS = {
    "read": "reading files outside its folder",
    "home": "reading the user's home",
    "write": "writing outside its folder",
    "mode": "changing modes and times of files outside its folder",
    "socket": "opening a socket",
    "process": "starting a process",
    "signal": "reaching other processes",
    "priority": "changing the priority of other processes",
}
_PROBE = """
import json, os
canary, home, other = {arguments!r}
found = []

def attempt(name, act):
    try:
        act()
    except OSError:
        return
    found.append(name)

def write(path):
    with open(path, "w") as file:
        file.write("no bird")

def socket():
    import _socket
    _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)

def process():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

attempt("read", lambda: open(canary).read(1))
if home:
    attempt("home", lambda: open(home, "rb").read(1))
attempt("write", lambda: write(canary))
attempt("write", lambda: write(canary + "-beside"))
attempt("mode", lambda: os.chmod(canary, 0o644))
attempt("mode", lambda: os.utime(canary))
attempt("socket", socket)
attempt("process", process)
attempt("signal", lambda: os.kill(other, 0))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, other, 1))
write("here")
print(json.dumps(found))
"""
"""The program that tests an isolation: it attempts what must not be possible, and prints what succeeded.

Its arguments: a file that it must neither read nor change, a file of the user's, and a process to signal."""
