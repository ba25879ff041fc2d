"""The process between Braid and a program: it builds the fence, starts the steps inside, watches them and reports.

It is a small Python of its own, not a fork of the process with the model in it. A job comes as JSON on its input, a
report goes to its output. Its child, the starter, lives inside the fence (as the first process of the namespace, where
there is one), waits for a word, starts one step, reports how it ended, and so on. Whatever a step does, killing is done
from outside.
"""

import contextlib
import fcntl
import json
import os
import resource
import selectors
import signal
import sys
import time
from typing import Any

from braidlm.evals.sandbox import call_filter, kernel
from braidlm.evals.sandbox.fences import FENCES, Fence, memory_below

LOOK_EVERY = 0.05
"""Seconds between two looks at what cannot be limited otherwise: the memory of some steps, the disk of some fences."""
KEPT = 65_536
"""Bytes of each output that are reported."""


def main() -> None:
    """Read a job, run it, report."""
    kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)
    job = json.load(sys.stdin)
    try:
        report = Watcher(job).run()
    except OSError as error:
        report = {"broken": str(error), "steps": []}
    json.dump(report, sys.stdout)


class Watcher:
    """Outside the fence: gives the word for each step, reads what it prints, and ends it when it goes too far."""

    def __init__(self, job: dict[str, Any]):
        self.job = job
        self.fence = FENCES[job["fence"]](job)
        self.word, self.status, self.out, self.err = (os.pipe() for _ in range(4))
        self.heard = b""

    def run(self) -> dict[str, Any]:
        """All steps, up to the first that fails."""
        self.fence.enter()
        kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)  # again: a change of user has cleared it
        self.starter = os.fork()
        if self.starter == 0:
            with contextlib.suppress(BaseException):
                Starter(self.job, self.fence, self.word[0], self.status[1], (self.out[1], self.err[1])).run()
            os._exit(1)
        for end in (self.word[0], self.status[1], self.out[1], self.err[1]):
            os.close(end)
        for end in (self.status[0], self.out[0], self.err[0]):
            os.set_blocking(end, False)
        with contextlib.suppress(OSError):  # larger pipes wake us less often
            fcntl.fcntl(self.out[0], 1031, 1 << 20)
        steps: list[dict[str, Any]] = []
        broken = None
        try:
            begun = self._listen(time.monotonic() + 30)
            broken = begun.get("broken", None if "ready" in begun else "the fence could not be built")
            for step in self.job["steps"]:
                if broken:
                    break
                steps.append(self._watch(step))
                broken = steps[-1].pop("broken", None)
                if steps[-1]["stopped"] or steps[-1]["code"] != 0:
                    break
        finally:
            self.fence.kill_all(self.starter)
        return {"broken": broken, "steps": steps}

    def _watch(self, step: dict[str, Any]) -> dict[str, Any]:
        """One step."""
        printed = {self.out[0]: bytearray(), self.err[0]: bytearray()}
        amount, stopped, ended = 0, None, None
        begun = time.monotonic()
        memory, disk = step["memory_is_watched"], self.job["fence"] != "namespaces"
        with selectors.DefaultSelector() as ready:
            for end in (self.status[0], self.out[0], self.err[0]):
                ready.register(end, selectors.EVENT_READ)
            os.write(self.word[1], b"g")
            while ended is None and stopped is None:
                left = begun + step["wall"] - time.monotonic()
                if left <= 0:
                    stopped = "wall"
                    break
                events = ready.select(min(left, LOOK_EVERY) if memory or disk else left)
                for key, _ in events:
                    if key.fd == self.status[0]:
                        ended = self._next_message()
                    else:
                        amount += self._read(key.fd, printed[key.fd])
                if amount > step["output"]:
                    stopped = "output"
                elif memory and memory_below(self.starter) > step["memory"]:
                    stopped = "memory"
                elif disk and self.fence.disk_used() > self.job["disk"]:
                    stopped = "disk"
        if ended is not None:  # all that could write has been killed: what there is stands in the pipes
            amount += sum(self._read(end, printed[end]) for end in printed)
            if amount > step["output"]:
                stopped = "output"
        ended = ended or {}
        return {
            "stopped": stopped,
            "code": ended.get("code"),
            "broken": ended.get("broken"),
            "cpu": ended.get("cpu"),
            "wall": time.monotonic() - begun,
            "out": printed[self.out[0]][-KEPT:].decode(errors="replace"),
            "err": printed[self.err[0]][-KEPT:].decode(errors="replace"),
        }

    def _read(self, end: int, into: bytearray) -> int:
        """All that stands in a pipe; of much, the last part is kept."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(end, 1 << 20):
                count += len(piece)
                into += piece
                del into[:-KEPT]
                if count > 1 << 24:
                    break
        return count

    def _next_message(self) -> dict[str, Any] | None:
        """A whole line of the starter's; a starter that is gone says that something is broken."""
        try:
            piece = os.read(self.status[0], 65_536)
        except BlockingIOError:
            return None
        if not piece:
            return {"broken": "the sandbox ended by itself"}
        self.heard += piece
        if b"\n" not in self.heard:
            return None
        line, self.heard = self.heard.split(b"\n", 1)
        return json.loads(line)

    def _listen(self, until: float) -> dict[str, Any]:
        with selectors.DefaultSelector() as ready:
            ready.register(self.status[0], selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0:
                if ready.select(left) and (message := self._next_message()) is not None:
                    return message
        return {}


class Starter:
    """Inside the fence: starts each step and waits for it."""

    def __init__(self, job: dict[str, Any], fence: Fence, word: int, status: int, outputs: tuple[int, int]):
        self.job, self.fence, self.word, self.status, self.outputs = job, fence, word, status, outputs

    def run(self) -> None:
        kernel.control(kernel.DIE_WITH_PARENT, signal.SIGKILL)
        try:
            self.fence.close()
        except OSError as error:
            self._say({"broken": str(error)})
            return
        self._say({"ready": True})
        for step in self.job["steps"]:
            if not os.read(self.word, 1):
                return
            self._say(self._step(step))

    def _step(self, step: dict[str, Any]) -> dict[str, Any]:
        trouble, end = os.pipe()
        limit = self.fence.process_limit(step["processes"])
        process = os.fork()
        if process == 0:
            try:
                self._become(step, limit)
            except BaseException as error:
                os.write(end, str(error).encode())
            os._exit(126)
        os.close(end)
        said = os.read(trouble, 4096).decode()
        os.close(trouble)
        _, code, used = os.wait4(process, 0)
        self._end_the_rest()
        if said:
            return {"broken": f"{step['command'][0]} could not be started: {said}"}
        return {"code": os.waitstatus_to_exitcode(code), "cpu": used.ru_utime + used.ru_stime}

    def _become(self, step: dict[str, Any], processes: int | None) -> None:
        """This process turns into the program."""
        os.setsid()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python has it, and a program would inherit it
            signal.signal(ignored, signal.SIG_DFL)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(self.outputs[0], 1)
        os.dup2(self.outputs[1], 2)
        os.chdir(self.fence.scratch)
        _set_limits(step, processes)
        self.fence.lock_in()
        if self.job["filter"]:
            call_filter.forbid_calls(step["may_fork"])
        words = [word.replace("{scratch}", self.fence.scratch) for word in step["command"]]
        places = {"HOME": self.fence.scratch, "TMPDIR": self.fence.scratch}
        own = {key: value.replace("{scratch}", self.fence.scratch) for key, value in step["environment"].items()}
        os.execve(words[0], words, {**places, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **own})

    def _end_the_rest(self) -> None:
        """What a step has left running. As the first process of a namespace, -1 is exactly that."""
        if os.getpid() != 1:
            return  # the launcher sees to it at the end
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()

    def _say(self, message: dict[str, Any]) -> None:
        os.write(self.status, json.dumps(message).encode() + b"\n")


def _set_limits(step: dict[str, Any], processes: int | None) -> None:
    seconds = step["seconds"]
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_CORE: 1,  # not 0: a system that pipes dumps to a program keeps them all the same
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
    for which, most in limits.items():
        soft, hard = most if isinstance(most, tuple) else (most, most)
        _, before = resource.getrlimit(which)
        if before != resource.RLIM_INFINITY:
            soft, hard = min(soft, before), min(hard, before)
        resource.setrlimit(which, (soft, hard))
