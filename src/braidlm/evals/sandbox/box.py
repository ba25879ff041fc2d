"""The sandbox as the rest of Braid sees it: programs in, what became of them out.

`Sandbox.open` finds the best fence of this system, tries it with a program that attempts what must not be possible, and
refuses to run anything if one attempt succeeds.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from braidlm.core.errors import BraidError
from braidlm.evals.sandbox import kernel, landlock
from braidlm.evals.sandbox.probe import ATTEMPTS, probe

Isolation = Literal["required", "best"]
MEGABYTE = 1 << 20
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/ssl/openssl.cnf",
    "/nix/store",
    "/gnu/store",
)
"""What programs of a system need to run; no settings, no users, no homes."""
SYSTEM_PATTERNS = ("/etc/java-*",)
_USERS = itertools.cycle(range(60_000, 65_000))
"""Whom programs run as where Braid is root: one that hardly a system has, each another, so that they can be counted."""
ADDED_SECONDS = 60
"""How much longer than its own limits a launcher may take before something is wrong with it."""


@dataclass(frozen=True)
class Limits:
    """What one step may use."""

    seconds: int = 3
    """Of processor time."""
    wall: float = 10.0
    """Seconds by the clock."""
    memory: int = 1024 * MEGABYTE
    memory_is_watched: bool = False
    """For runtimes that reserve far more addresses than they use: what is in memory is counted, by looking."""
    may_fork: bool = False
    """Whether it may start processes; threads always."""
    processes: int = 32
    """Processes and threads together."""
    open_files: int = 64
    file_size: int = 16 * MEGABYTE
    output: int = MEGABYTE
    """Bytes that may be printed."""


@dataclass(frozen=True)
class Step:
    """One command, its first word a full path; `{scratch}` is the folder that the files are in."""

    command: Sequence[str]
    limits: Limits = field(default_factory=Limits)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """Files, and steps to take one after another in their folder, while they end with 0."""

    files: dict[str, str]
    steps: Sequence[Step]
    disk: int = 64 * MEGABYTE
    """What all files may have together."""


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    reason: str
    """Why it failed; empty if every step ended with 0 within its limits."""
    out: str = ""
    """The end of what the last step printed."""
    err: str = ""
    steps: int = 0
    """How many were taken."""

    @property
    def ended_well(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Sandbox:
    """A fence that was tried."""

    fence: str
    filter: bool
    readable: tuple[str, ...]
    failures: tuple[str, ...] = ()
    """What it does not prevent, with `isolation="best"`."""

    @classmethod
    def open(cls, isolation: Isolation = "required", toolchains: Iterable[str] = ()) -> "Sandbox":
        """The best fence of this system, in which programs can read these toolchains; or an error that says why not."""
        return _opened(isolation, tuple(dict.fromkeys(toolchains)))

    @property
    def statement(self) -> list[str]:
        """What is enforced on this system."""
        lines = list(_STATEMENTS[self.fence])
        if self.filter:
            lines.append("system calls: no sockets, no signals to others, no tracing, no mounts (seccomp)")
        lines.append("limits on processor time, time, memory, processes, open files, file sizes and output")
        if self.failures:
            lines.append(f"NOT prevented: {', '.join(self.failures)}")
        return lines

    def run(self, program: Program) -> Outcome:
        """One program; returns when nothing of it is left."""
        with tempfile.TemporaryDirectory(prefix="braid-") if self.fence != "namespaces" else _nothing() as scratch:
            job = {
                "fence": self.fence,
                "filter": self.filter,
                "readable": self.readable,
                "user": next(_USERS),
                "scratch": scratch,
                "files": program.files,
                "disk": program.disk,
                "steps": [{**asdict(step.limits), **_of_step(step)} for step in program.steps],
            }
            patience = sum(step.limits.wall for step in program.steps) + ADDED_SECONDS
            report = _launch(job, patience)
        if report["broken"]:
            raise BraidError(f"the sandbox broke down: {report['broken']}", "code execution")
        return _outcome(report["steps"], program)

    def run_all(
        self, programs: Sequence[Program], advance: Callable[[int, int], None] | None = None, workers: int | None = None
    ) -> list[Outcome]:
        """Many programs, as many at once as there are processors; outcomes in their order."""
        workers = workers or len(os.sched_getaffinity(0))
        found = []
        with ThreadPoolExecutor(workers) as pool:
            try:
                for outcome in pool.map(self.run, programs):
                    found.append(outcome)
                    if advance is not None:
                        advance(len(found), len(programs))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return found


_STATEMENTS = {
    "namespaces": (
        "files: its own root folder, with toolchains read-only, a scratch folder and nothing else (mount namespace)",
        "network: none (network namespace)",
        "processes: it sees only its own, and all are killed at the end (process namespace)",
    ),
    "landlock": (
        "files: toolchains read-only, a scratch folder on disk and nothing else (Landlock)",
        "processes: all are killed at the end; no signals to others",
    ),
    "none": ("files and network: NOT isolated", "processes: all are killed at the end"),
}


def _opened(isolation: Isolation, toolchains: tuple[str, ...]) -> Sandbox:
    if sys.platform != "linux":
        raise BraidError(
            f"programs that a model wrote are run on Linux only, and this is {sys.platform}",
            "code execution",
            "Evaluate in a Linux container or virtual machine.",
        )
    readable = tuple(_readable(toolchains))
    known = kernel.MACHINE in kernel.SUPPORTED
    troubles = []
    for fence in ("namespaces", "landlock"):
        sandbox = Sandbox(fence, True, readable)
        trouble = _trouble(sandbox, known)
        if trouble is None:
            return sandbox
        troubles.append(f"{fence}: {trouble}")
    if isolation == "required":
        raise BraidError(
            "this system offers no way to isolate programs (" + "; ".join(troubles) + ")",
            "code execution",
            "Run on a system with user namespaces or Landlock (Linux 5.13), or as root in a virtual machine. In a "
            "throw-away machine without secrets, code_isolation=best runs programs with limits alone.",
        )
    sandbox = Sandbox("none", known and not _failed(Sandbox("none", True, readable))[1], readable)
    failures, trouble = _failed(sandbox)
    if trouble:
        raise BraidError(f"programs cannot be run on this system ({trouble})", "code execution")
    return Sandbox("none", sandbox.filter, readable, tuple(failures))


def _trouble(sandbox: Sandbox, known: bool) -> str | None:
    """Why a fence cannot be used."""
    if not known:
        return f"its system calls on {kernel.MACHINE} are not known"
    if sandbox.fence == "landlock" and landlock.version() == 0:
        return "the kernel has none"
    failures, trouble = _failed(sandbox)
    return trouble or (f"does not prevent {', '.join(failures)}" if failures else None)


def _failed(sandbox: Sandbox) -> tuple[list[str], str | None]:
    """What a program could do in this sandbox that it must not, and why it could not be tried."""
    with tempfile.TemporaryDirectory(prefix="braid-") as folder:
        os.chmod(folder, 0o755)
        canary = Path(folder) / "canary"
        canary.write_text("a bird")
        canary.chmod(0o666)
        program = Program(
            {"probe.py": probe(str(canary), _a_file_at_home(sandbox.readable), os.getpid())},
            [Step([python(), "-I", "-S", "{scratch}/probe.py"], Limits(wall=20))],
        )
        try:
            outcome = sandbox.run(program)
            done = json.loads(outcome.out)
        except BraidError as error:
            return [], error.what
        except ValueError:
            return [], f"Python does not run in it ({outcome.reason})"
        changed = canary.read_text() != "a bird" or len(list(Path(folder).iterdir())) > 1
    failures = [ATTEMPTS[name] for name in done if name in ATTEMPTS]
    return failures + (["writing outside its folder"] if changed and "write" not in done else []), None


def python() -> str:
    """The interpreter itself, not a link to it in some environment."""
    return os.path.realpath(sys.executable)


def _readable(toolchains: Sequence[str]) -> list[str]:
    """The system, Python, and the folders of the toolchains that lie elsewhere; none of them inside another."""
    wanted = [*SYSTEM, *(path for pattern in SYSTEM_PATTERNS for path in sorted(glob.glob(pattern)))]
    wanted += [os.path.realpath(sys.base_prefix), *(os.path.realpath(path) for path in toolchains)]
    found: list[str] = []
    for path in wanted:
        inside = any(path == other or path.startswith(other.rstrip("/") + "/") for other in found)
        if os.path.lexists(path) and not inside:
            found.append(path)
    return found


def _a_file_at_home(readable: Sequence[str]) -> str | None:
    """Some file of the user's that no program should see."""
    with contextlib.suppress(OSError):
        for path in sorted(Path.home().iterdir()):
            if path.is_file() and not any(str(path).startswith(other) for other in readable):
                return str(path)
    return None


def _of_step(step: Step) -> dict[str, Any]:
    return {"command": list(step.command), "environment": step.environment}


def _nothing() -> contextlib.AbstractContextManager[str | None]:
    return contextlib.nullcontext(None)


def _launch(job: dict[str, Any], patience: float) -> dict[str, Any]:
    """Run a launcher; it and all below it are gone when this returns."""
    source = Path(__file__).parents[3]
    start = "import sys; sys.path.insert(0, sys.argv[1]); from braidlm.evals.sandbox.launcher import main; main()"
    launcher = subprocess.Popen(
        [python(), "-I", "-S", "-B", "-c", start, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={},
        start_new_session=True,
    )
    try:
        out, err = launcher.communicate(json.dumps(job), patience)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return {"broken": f"it did not end within {patience:g} seconds", "steps": []}
        raise
    try:
        return json.loads(out)
    except ValueError:
        last = err.strip().splitlines()[-1:] or [f"its launcher ended with {launcher.returncode}"]
        return {"broken": last[0], "steps": []}


def _outcome(steps: list[dict[str, Any]], program: Program) -> Outcome:
    last = steps[-1]
    reason = _reason(last, program.steps[len(steps) - 1].limits, program.disk)
    return Outcome(reason, last["out"], last["err"], len(steps))


def _last_words(text: str) -> str:
    """The line that says what went wrong: the last, or of Node, which ends with a trace and its version, the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[-1].startswith("Node.js v"):
        lines = [line for line in lines if re.match(r"(Uncaught )?\w*Error\b", line)] or lines[:-1]
    return lines[-1][:200] if lines else ""


def _reason(step: dict[str, Any], limits: Limits, disk: int) -> str:
    """Why a step failed, in a line."""
    stopped = {
        "wall": f"took longer than {limits.wall:g} seconds",
        "memory": f"used more than {limits.memory // MEGABYTE:,} MB of memory",
        "disk": f"wrote more than {disk // MEGABYTE:,} MB of files",
        "output": f"printed more than {limits.output:,} bytes",
    }
    if step["stopped"]:
        return stopped[step["stopped"]]
    code = step["code"]
    if code == 0:
        return ""
    if code in (-signal.SIGXCPU, -signal.SIGKILL) and (step["cpu"] or 0) >= limits.seconds - 0.1:
        return f"used more than {limits.seconds} seconds of processor time"
    if code == -signal.SIGXFSZ:
        return f"wrote a file larger than {limits.file_size // MEGABYTE:,} MB"
    detail = f": {said}" if (said := _last_words(step["err"] or step["out"])) else ""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}{detail}"
    return f"ended with {code}{detail}"
