"""The process between Braid and a program: it sets up the isolation, runs the steps inside, supervises and reports.

It is a separate small Python process, not a fork of the process with the model in it. A job comes as JSON on stdin, a
report goes to stdout. Its child, the step runner, lives inside the isolation (as the first process of the namespace,
where there is one), waits for a signal, starts one step, reports how it ended, and so on. Processes are always killed
from outside.
"""

import contextlib
import fcntl
import json
import os
import resource
import selectors
import signal
import stat
import sys
import time
from typing import Any

from braidlm.evals.sandbox import call_filter, kernel
from braidlm.evals.sandbox.isolation import ISOLATIONS, Isolation, resident_memory

POLL_INTERVAL = 0.02
"""Seconds between polls of what has no kernel limit: the memory of some steps, the disk usage of some isolations."""
MAX_OUTPUT = 65_536
"""Bytes of each output that are reported."""


def main() -> None:
    """Read a job, run it, write the report."""
    kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)
    job = json.load(sys.stdin)
    try:
        report = Supervisor(job).run()
    except OSError as error:
        report = {"broken": str(error), "steps": []}
    json.dump(report, sys.stdout)


class Supervisor:
    """Outside the isolation: starts each step, reads its output, and stops it when it exceeds a limit."""

    def __init__(self, job: dict[str, Any]):
        self.job = job
        self.isolation = ISOLATIONS[job["isolation"]](job)
        self.start, self.status, self.out, self.err = (os.pipe() for _ in range(4))
        self.received = b""

    def run(self) -> dict[str, Any]:
        """Run all steps, up to the first that fails."""
        self.isolation.enter()
        kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)  # again: a change of user clears it
        kernel.control(kernel.MAY_BE_READ, 0)  # the job has the tests, which a program of the same user must not see
        self.runner = os.fork()
        if self.runner == 0:
            with contextlib.suppress(BaseException):
                StepRunner(self.job, self.isolation, self.start[0], self.status[1], (self.out[1], self.err[1])).run()
            os._exit(1)
        for end in (self.start[0], self.status[1], self.out[1], self.err[1]):
            os.close(end)
        for end in (self.status[0], self.out[0], self.err[0]):
            os.set_blocking(end, False)
        with contextlib.suppress(OSError):  # a larger pipe needs fewer reads
            fcntl.fcntl(self.out[0], 1031, 1 << 20)
        steps: list[dict[str, Any]] = []
        broken = None
        try:
            message = self._wait_message(time.monotonic() + 30)
            broken = message.get("broken", None if "ready" in message else "the isolation could not be set up")
            for step in self.job["steps"]:
                if broken:
                    break
                steps.append(self._supervise(step))
                broken = steps[-1].pop("broken", None)
                if steps[-1]["stopped"] or steps[-1]["code"] != 0:
                    break
        finally:
            self.isolation.kill_all(self.runner)
        return {"broken": broken, "steps": steps}

    def _supervise(self, step: dict[str, Any]) -> dict[str, Any]:
        """Run one step."""
        printed = {self.out[0]: bytearray(), self.err[0]: bytearray()}
        amount, stopped, ended = 0, None, None
        begun = time.monotonic()
        next_poll = begun
        with selectors.DefaultSelector() as ready:
            for end in (self.status[0], self.out[0], self.err[0]):
                ready.register(end, selectors.EVENT_READ)
            os.write(self.start[1], b"g")
            while ended is None and stopped is None:
                left = begun + step["wall"] - time.monotonic()
                if left <= 0:
                    stopped = "wall"
                    break
                for key, _ in ready.select(min(left, POLL_INTERVAL)):
                    if key.fd == self.status[0]:
                        ended = self._next_message()
                    else:
                        amount += self._read(key.fd, printed[key.fd])
                if amount > step["output"]:
                    stopped = "output"
                elif time.monotonic() >= next_poll:
                    stopped = self._polled_limit(step)
                    next_poll = time.monotonic() + POLL_INTERVAL
        if ended is not None:  # all writers have been killed: the rest of the output is in the pipes
            amount += sum(self._read(end, printed[end]) for end in printed)
            stopped = "output" if amount > step["output"] else stopped or self.isolation.disk_limit_exceeded()
        ended = ended or {}
        return {
            "stopped": stopped,
            "code": ended.get("code"),
            "broken": ended.get("broken"),
            "cpu": ended.get("cpu"),
            "program": ended.get("program"),
            "wall": time.monotonic() - begun,
            "out": printed[self.out[0]][-MAX_OUTPUT:].decode(errors="replace"),
            "err": printed[self.err[0]][-MAX_OUTPUT:].decode(errors="replace"),
        }

    def _polled_limit(self, step: dict[str, Any]) -> str | None:
        """Which of the limits is exceeded that the kernel does not enforce."""
        if step["memory_is_watched"] and resident_memory(self.runner) > step["memory"]:
            return "memory"
        return self.isolation.disk_limit_exceeded()

    def _read(self, end: int, into: bytearray) -> int:
        """Read all that is in a pipe; only the end of a long output is kept."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(end, 1 << 20):
                count += len(chunk)
                into += chunk
                del into[:-MAX_OUTPUT]
                if count > 1 << 24:
                    break
        return count

    def _next_message(self) -> dict[str, Any] | None:
        """A message of the step runner, if it is complete; if the runner is gone, the sandbox is broken."""
        try:
            chunk = os.read(self.status[0], 65_536)
        except BlockingIOError:
            return None
        if not chunk:
            return {"broken": "the sandbox ended by itself"}
        self.received += chunk
        if b"\n" not in self.received:
            return None
        line, self.received = self.received.split(b"\n", 1)
        return json.loads(line)

    def _wait_message(self, deadline: float) -> dict[str, Any]:
        with selectors.DefaultSelector() as ready:
            ready.register(self.status[0], selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if ready.select(left) and (message := self._next_message()) is not None:
                    return message
        return {}


class StepRunner:
    """Inside the isolation: starts each step and waits for it."""

    def __init__(self, job: dict[str, Any], isolation: Isolation, start: int, status: int, outputs: tuple[int, int]):
        self.job, self.isolation, self.start, self.status, self.outputs = job, isolation, start, status, outputs

    def run(self) -> None:
        kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)
        try:
            self.isolation.set_up()
        except OSError as error:
            self._send({"broken": str(error)})
            return
        self._send({"ready": True})
        for step in self.job["steps"]:
            if not os.read(self.start, 1):
                return
            report = self._step(step)
            self._kill_remaining()
            self._send(report)

    def _step(self, step: dict[str, Any]) -> dict[str, Any]:
        out, err = self.outputs
        try:
            if step["harness"] is None:
                return self._ended(self._start(step, step, (out, err)))
            with contextlib.ExitStack() as pipes:
                (questions, ask), (answers, answer) = (_pipe(pipes) for _ in range(2))
                program = self._start(step, step, (err, err, questions, answer))
                harness = self._start(step["harness"], step, (out, err, answers, ask))
        except ChildProcessError as error:
            return {"broken": str(error)}
        report = self._ended(harness)
        os.kill(program, signal.SIGKILL)
        return {**report, "program": self._ended(program)}

    def _ended(self, process: int) -> dict[str, Any]:
        """Wait for a process."""
        _, code, used = os.wait4(process, 0)
        return {"code": os.waitstatus_to_exitcode(code), "cpu": used.ru_utime + used.ru_stime}

    def _start(self, what: dict[str, Any], step: dict[str, Any], descriptors: tuple[int, ...]) -> int:
        """Start the program or the harness of a step, with its input and these descriptors."""
        problem, end = os.pipe()
        limit = self.isolation.process_limit(step["processes"])
        process = os.fork()
        if process == 0:
            try:
                self._execute(what, step, descriptors, limit)
            except BaseException as error:
                os.write(end, str(error).encode())
            os._exit(126)
        os.close(end)
        error_text = os.read(problem, 4096).decode()
        os.close(problem)
        if error_text:
            raise ChildProcessError(f"{what['command'][0]} could not be started: {error_text}")
        return process

    def _execute(
        self, what: dict[str, Any], step: dict[str, Any], descriptors: tuple[int, ...], processes: int | None
    ) -> None:
        """Replace this process by the program."""
        os.setsid()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
            signal.signal(ignored, signal.SIG_DFL)
        _set_descriptors([_readable(what["input"]), *descriptors])
        os.chdir(self.isolation.scratch)
        if what["command"][0].startswith("{scratch}/"):
            _make_executable(what["command"][0].removeprefix("{scratch}/"))
        _set_limits(step, processes)
        if what is step and step["harness"]:
            self.isolation.hide_processes()
        self.isolation.restrict()
        if self.job["filter"]:
            call_filter.forbid_calls(step["may_fork"])
        scratch = self.isolation.scratch
        command = [word.replace("{scratch}", scratch) for word in what["command"]]
        folders = {"HOME": scratch, "TMPDIR": scratch}
        own = {key: value.replace("{scratch}", scratch) for key, value in step["environment"].items()}
        os.execve(command[0], command, {**folders, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **own})

    def _kill_remaining(self) -> None:
        """Kill what a step has left running: for the first process of a namespace, -1 is exactly that."""
        if os.getpid() != 1:
            return  # the supervisor kills it at the end
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()

    def _send(self, message: dict[str, Any]) -> None:
        os.write(self.status, json.dumps(message).encode() + b"\n")


def _pipe(closing: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe, whose ends this process closes after it has started those that use it."""
    ends = os.pipe()
    for end in ends:
        closing.callback(os.close, end)
    return ends


def _readable(text: str) -> int:
    """A file in memory with this text, which never is on a disk that a program could read."""
    file = os.memfd_create("input")
    with os.fdopen(os.dup(file), "w", encoding="utf-8", newline="") as writer:
        writer.write(text)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _set_descriptors(descriptors: list[int]) -> None:
    """Make these the descriptors 0, 1, 2 and so on; all others are closed when the program begins."""
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100) for descriptor in descriptors]
    for number, descriptor in enumerate(aside):
        os.dup2(descriptor, number)


def _make_executable(path: str) -> None:
    """Do what a linker in the sandbox may not: no program there changes the modes of files."""
    with contextlib.suppress(OSError):  # what is not there is reported when it is started
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.fchmod(file, 0o755)
        os.close(file)


def _set_limits(step: dict[str, Any], processes: int | None) -> None:
    seconds = step["seconds"]
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_CORE: 1,  # not 0: a system that pipes core dumps to a program ignores 0
        resource.RLIMIT_FSIZE: step["file_size"],
        resource.RLIMIT_NOFILE: step["open_files"],
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_DATA: step["memory"],
    }
    if not step["memory_is_watched"]:
        limits[resource.RLIMIT_AS] = step["memory"]
    if processes is not None:
        limits[resource.RLIMIT_NPROC] = processes
    for kind, limit in limits.items():
        soft, hard = limit if isinstance(limit, tuple) else (limit, limit)
        _, before = resource.getrlimit(kind)
        if before != resource.RLIM_INFINITY:
            soft, hard = min(soft, before), min(hard, before)
        resource.setrlimit(kind, (soft, hard))
