"""Runs all hostile programs in one isolation, as the user that it is started as; a job on stdin, outcomes on stdout."""

import contextlib
import ctypes
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

job = json.load(sys.stdin)
sys.path[:0] = [job["source"], job["tests"]]

from hostile_programs import FLOODS, sources  # noqa: E402

from braidlm.core.errors import BraidError  # noqa: E402
from braidlm.evals.sandbox import sandbox as sandbox_module  # noqa: E402
from braidlm.evals.sandbox.sandbox import Limits, Program, Sandbox, Step, python  # noqa: E402

folder = Path(job["folder"])
token = f"braid-hostile-{os.getpid()}"


def state(victim: Path) -> dict[str, Any]:
    """All of the outside that programs tried to change."""
    facts = {
        str(path.name): [path.stat().st_mode, path.stat().st_uid, path.stat().st_mtime_ns, path.stat().st_nlink]
        for path in (victim, victim.parent, Path(python()))
    }
    return {
        "files": facts,
        "text": victim.read_text(),
        "names": sorted(path.name for path in victim.parent.iterdir()),
        "attributes": attributes(victim),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "scheduler": os.sched_getscheduler(0),
        "host": os.uname().nodename,
    }


def attributes(path: Path) -> list[str] | None:
    try:
        return os.listxattr(path)
    except OSError:  # not every file system has them
        return None


def processes() -> list[str]:
    """The processes of these programs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if token.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def shared_memory() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob("braid-hostile*"))


def run(sandbox: Sandbox, text: str, limits: dict[str, Any]) -> tuple[str, str]:
    step = Step([python(), "-I", "-S", "{scratch}/main.py", token], Limits(**{"wall": 30, **limits}))
    outcome = sandbox.run(Program({"main.py": text}, [step]))
    return outcome.reason, outcome.out[-1000:]


def main() -> dict[str, Any]:
    temporary = folder / "temporary"
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    sandbox = Sandbox(job["isolation"], True, tuple(sandbox_module._readable(())))
    failures, problem = sandbox_module._tested(sandbox)
    if problem or failures:
        return {"skip": problem or f"does not prevent {failures}"}
    victim = folder / "home" / "victim"
    (victim.parent / "empty").mkdir(parents=True)
    victim.write_text("the user's own")
    with contextlib.suppress(OSError):
        os.setxattr(victim, "user.victim", b"1")
    libc = ctypes.CDLL(None)
    segment = libc.shmget(0, 4096, 0o1600)
    before = state(victim)
    context = {
        "VICTIM": str(victim),
        "FOLDER": str(victim.parent),
        "PARENT": os.getpid(),
        "TOOL": "/usr/bin/env",
        "SEGMENT": segment,
    }
    attempts = sources(**context)
    programs = [(text, {}) for _, text in attempts] + [(text, limits) for text, limits, _ in FLOODS.values()]
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            done = list(pool.map(lambda each: run(sandbox, *each), programs))
        after = state(victim)
    finally:
        libc.shmctl(segment, 0, None)
    left = {
        "files": [str(path) for path in temporary.iterdir()],
        "processes": processes(),
        "shared memory": shared_memory(),
    }
    results: dict[str, tuple[str, str]] = dict(zip(FLOODS, done[len(attempts) :], strict=True))
    for (names, _), (reason, printed) in zip(attempts, done, strict=False):
        lines = [*printed.splitlines(), *["did not come so far"] * len(names)]
        results |= {name: (reason, line) for name, line in zip(names, lines, strict=False)}
    return {"programs": results, "before": before, "after": after, "left": left}


try:
    print(json.dumps(main()))
except BraidError as error:
    print(json.dumps({"problem": str(error)}))
