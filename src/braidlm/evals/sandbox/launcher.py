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
import select
import signal
import stat
import sys
import time
from typing import Any

from braidlm.evals.sandbox import kernel
from braidlm.evals.sandbox.isolation import ISOLATIONS, Isolation, resident_memory

POLL_INTERVAL = 0.02
"""Seconds between polls of what has no kernel limit: the memory of some steps, the disk usage of some isolations."""
MAX_OUTPUT = 65_536
"""Bytes of each output that are reported."""
MAX_ERROR = 600
"""Characters of an error; a whole message is written and read at once, as a pipe does with up to 4,096 bytes."""


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
        (start, self.start), (self.status, status), (self.out, out), (self.err, err) = (os.pipe() for _ in range(4))
        self.inner = (start, status, out, err)
        """The step runner's ends of these pipes."""

    def run(self) -> dict[str, Any]:
        """Run all steps, up to the first that fails."""
        self.isolation.enter()
        kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)  # again: a change of user clears it
        kernel.control(kernel.MAY_BE_READ, 0)  # the job has the tests, which a program of the same user must not see
        self.runner = os.fork()
        if self.runner == 0:
            with contextlib.suppress(BaseException):
                StepRunner(self.job, self.isolation, *self.inner).run()
            os._exit(1)
        for end in self.inner:
            os.close(end)
        for end in (self.out, self.err):
            os.set_blocking(end, False)
        with contextlib.suppress(OSError):  # a larger pipe needs fewer reads
            fcntl.fcntl(self.out, 1031, 1 << 20)
        steps: list[dict[str, Any]] = []
        broken = "the isolation could not be set up"
        try:
            if select.select([self.status], [], [], 30)[0]:
                broken = self._message()["broken"]
            for step in self.job["steps"]:
                if broken or (steps and (steps[-1]["stopped"] or steps[-1]["code"] != 0)):
                    break
                steps.append(self._supervise(step))
                broken = steps[-1].pop("broken")
        finally:
            self.isolation.kill_all(self.runner)
        return {"broken": broken, "steps": steps}

    def _supervise(self, step: dict[str, Any]) -> dict[str, Any]:
        printed = {self.out: bytearray(), self.err: bytearray()}
        amount, stopped, ended = 0, None, None
        next_poll = begun = time.monotonic()
        os.write(self.start, b"g")
        while ended is None and stopped is None:
            left = begun + step["wall"] - time.monotonic()
            for end in select.select([self.status, *printed], [], [], max(0, min(left, POLL_INTERVAL)))[0]:
                if end == self.status:
                    ended = self._message()
                else:
                    amount += self._read(end, printed[end])
            if ended is None and left <= 0:
                stopped = "wall"
            elif amount > step["output"]:
                stopped = "output"
            elif time.monotonic() >= next_poll:
                too_large = step["memory_is_watched"] and resident_memory(self.runner) > step["memory"]
                stopped = "memory" if too_large else self.isolation.disk_limit_exceeded()
                next_poll = time.monotonic() + POLL_INTERVAL
        if ended is not None:  # all writers have been killed: the rest of the output is in the pipes
            amount += sum(self._read(end, printed[end]) for end in printed)
            stopped = "output" if amount > step["output"] else stopped or self.isolation.disk_limit_exceeded()
        texts = {end: content[-MAX_OUTPUT:].decode(errors="replace") for end, content in printed.items()}
        unknown = dict.fromkeys(("code", "cpu", "program", "broken"))
        return {**unknown, **(ended or {}), "stopped": stopped, "out": texts[self.out], "err": texts[self.err]}

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

    def _message(self) -> dict[str, Any]:
        """The message that the step runner has written; if the runner is gone, the sandbox is broken."""
        return json.loads(os.read(self.status, 65_536) or '{"broken": "the sandbox ended by itself"}')


class StepRunner:
    """Inside the isolation: starts each step and waits for it."""

    def __init__(self, job: dict[str, Any], isolation: Isolation, start: int, status: int, out: int, err: int):
        self.job, self.isolation, self.start, self.status, self.out, self.err = job, isolation, start, status, out, err

    def run(self) -> None:
        """Set the isolation up, then run a step whenever the supervisor says so."""
        kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)
        try:
            self.isolation.set_up()
        except OSError as error:
            self._send({"broken": str(error)[:MAX_ERROR]})
            return
        self._send({"broken": None})
        for step in self.job["steps"]:
            if not os.read(self.start, 1):
                return
            try:
                report = self._step(step)
            except ChildProcessError as error:
                report = {"broken": str(error)[:MAX_ERROR]}
            if os.getpid() == 1:  # for the first process of a namespace, -1 is exactly what a step has left running
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    while True:
                        os.wait()
            self._send(report)

    def _step(self, step: dict[str, Any]) -> dict[str, Any]:
        """Run a step; a program with tests in another process is killed when they have ended."""
        if not step["tests"]:
            return self._ended(self._start(step, step["input"], self.out, self.err))
        with contextlib.ExitStack() as pipes:
            (questions, ask), (answers, answer) = os.pipe(), os.pipe()
            for end in (questions, ask, answers, answer):
                pipes.callback(os.close, end)
            program = self._start(step, step["input"], self.err, self.err, questions, answer)
            tests = self._start({**step, "tests": ""}, step["tests"], self.out, self.err, answers, ask)
        report = self._ended(tests)
        os.kill(program, signal.SIGKILL)
        return {**report, "program": self._ended(program)}

    def _ended(self, process: int) -> dict[str, Any]:
        _, code, used = os.wait4(process, 0)
        return {"code": os.waitstatus_to_exitcode(code), "cpu": used.ru_utime + used.ru_stime}

    def _start(self, step: dict[str, Any], text: str, *outputs: int) -> int:
        """Start a process of a step, with a text as its input and these descriptors after that."""
        problem, end = os.pipe()
        limit = self.isolation.process_limit(step["processes"])
        process = os.fork()
        if process == 0:
            try:
                self._execute(step, [_readable(text), *outputs], limit)
            except BaseException as error:
                os.write(end, str(error).encode())
            os._exit(126)
        os.close(end)
        error_text = os.read(problem, 4096).decode()
        os.close(problem)
        if error_text:
            raise ChildProcessError(f"{step['command'][0]} could not be started: {error_text}")
        return process

    def _execute(self, step: dict[str, Any], descriptors: list[int], processes: int | None) -> None:
        """Replace this process by the program, with its descriptors as 0, 1, 2 and so on; all others are closed."""
        os.setsid()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
            signal.signal(ignored, signal.SIG_DFL)
        aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100) for descriptor in descriptors]
        for number, descriptor in enumerate(aside):
            os.dup2(descriptor, number)
        scratch = self.isolation.scratch
        os.chdir(scratch)
        if step["command"][0].startswith("{scratch}/"):
            _make_executable(step["command"][0].removeprefix("{scratch}/"))
        _set_limits(step, processes)
        if step["tests"]:
            self.isolation.hide_processes()
        self.isolation.restrict()
        if self.job["filter"]:
            kernel.forbid_calls(step["may_fork"])
        command = [word.replace("{scratch}", scratch) for word in step["command"]]
        environment = {"HOME": scratch, "TMPDIR": scratch, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        environment |= {key: value.replace("{scratch}", scratch) for key, value in step["environment"].items()}
        os.execve(command[0], command, environment)

    def _send(self, message: dict[str, Any]) -> None:
        os.write(self.status, json.dumps(message).encode())


def _readable(text: str) -> int:
    """A file in memory with this text, which never is on a disk that a program could read."""
    file = os.memfd_create("input")
    with os.fdopen(os.dup(file), "w", encoding="utf-8", newline="") as writer:
        writer.write(text)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _make_executable(path: str) -> None:
    """Do what a linker in the sandbox may not: no program there changes the modes of files."""
    with contextlib.suppress(OSError):  # what is not there is reported when it is started
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.fchmod(file, 0o755)
        os.close(file)


def _set_limits(step: dict[str, Any], processes: int | None) -> None:
    """Set the kernel's limits on this process: the first of a pair is the soft one."""
    seconds, memory = step["seconds"], step["memory"]
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_CORE: (1, 1),  # not 0: a system that pipes core dumps to a program ignores 0
        resource.RLIMIT_FSIZE: (step["file_size"],) * 2,
        resource.RLIMIT_NOFILE: (step["open_files"],) * 2,
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_DATA: (memory, memory),
        resource.RLIMIT_AS: None if step["memory_is_watched"] else (memory, memory),
        resource.RLIMIT_NPROC: None if processes is None else (processes, processes),
    }
    for kind, limit in limits.items():
        _, before = resource.getrlimit(kind)
        if limit is not None:
            unlimited = before == resource.RLIM_INFINITY
            soft, hard = limit if unlimited else (min(limit[0], before), min(limit[1], before))
            resource.setrlimit(kind, (soft, hard))
