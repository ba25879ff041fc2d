"""The sandbox: what a program does is contained, reported as a failure with its reason, and leaves nothing behind."""

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from braidlm.core.errors import BraidError
from braidlm.evals.sandbox import sandbox as sandbox_module
from braidlm.evals.sandbox.isolation import children
from braidlm.evals.sandbox.sandbox import MEGABYTE, Limits, Program, Sandbox, Step

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
SYSTEM_PYTHON = "/usr/bin/python3"
TOKEN = f"braid-sandbox-test-{os.getpid()}"


@functools.cache
def tried(isolation: str) -> tuple[str, tuple[str, ...]] | str:
    """A Python that runs in this isolation, and what it does not prevent; or why there is none.

    Root's own Python may lie in a home that nobody else can read: the system's is the second to be tried.
    """
    for python in (sandbox_module.python(), os.path.realpath(SYSTEM_PYTHON)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sandbox_module, "python", lambda python=python: python)
            failures, problem = sandbox_module._tested(Sandbox(isolation, True, tuple(sandbox_module._readable(()))))
        if problem is None:
            return python, tuple(failures)
    return str(problem)


MAP = """
import mmap
def filled():
    memory = mmap.mmap(-1, 1 << 24)
    memory.write(bytes(1 << 24))
    return memory
"""
THREAD = """
import threading, time
def begin():
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
"""


def opened(isolation: str, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """This isolation, with a Python that can be run in it."""
    found = tried(isolation)
    if isinstance(found, str):
        pytest.skip(f"no {isolation} here: {found}")
    python, failures = found
    assert isolation == "none" or not failures
    monkeypatch.setattr(sandbox_module, "python", lambda: python)
    return Sandbox(isolation, True, tuple(sandbox_module._readable(())))


@pytest.fixture(params=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Sandbox]:
    """Every isolation that protects; what a test leaves behind is an error."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    for path in (folder, *folder.parents):
        with contextlib.suppress(PermissionError):
            path.chmod(path.stat().st_mode | 0o011)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield opened(request.param, monkeypatch)
    assert not list(folder.iterdir())
    assert not ours(), "a process is left"


def ours() -> list[str]:
    """The processes of these tests."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if TOKEN.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def program(source: str, **limits: object) -> Program:
    all_limits = Limits(**{"wall": 20, **limits})  # type: ignore[arg-type]
    return Program(
        {"main.py": source}, [Step([sandbox_module.python(), "-I", "-S", "{scratch}/main.py", TOKEN], all_limits)]
    )


def test_a_program_that_behaves(sandbox: Sandbox) -> None:
    source = """
import os, threading
open("made", "w").write("x" * 1000)
os.mkdir("folder")
thread = threading.Thread(target=print, args=("from a thread",))
thread.start()
thread.join()
print(sorted(os.listdir(".")), sorted(os.environ))
"""
    outcome = sandbox.run(program(source))
    assert (outcome.reason, outcome.err) == ("", "")
    assert "from a thread" in outcome.out
    assert "['folder', 'made', 'main.py'] ['HOME', 'LANG', 'PATH', 'TMPDIR']" in outcome.out


@pytest.mark.parametrize(
    ("source", "limits", "reason"),
    [
        ("while True: pass", {"wall": 0.4}, "took longer than 0.4 seconds"),
        ("import time; time.sleep(1000)", {"wall": 0.4}, "took longer than 0.4 seconds"),
        ("while True: pass", {"seconds": 1}, "used more than 1 seconds of processor time"),
        (
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
            {"seconds": 1},
            "used more than 1 seconds of processor time",
        ),
        ("import os\nwhile True: os.fork()", {}, "ended with 1: PermissionError"),
        ("import os; os._exit(3 if os.system('true') else 0)", {}, "ended with 3"),
        ("data = bytearray(100 << 30)", {}, "ended with 1: MemoryError"),
        ("data = []\nwhile True: data.append(bytearray(1 << 20))", {"memory": 64 * MEGABYTE}, "MemoryError"),
        (f"{MAP}\nkept = []\nwhile True: kept.append(filled())", {"memory": 100 * MEGABYTE, "memory_is_watched": True},
         "used more than 100 MB of memory"),
        ("open('/usr/mine', 'w')", {}, "ended with 1:"),
        ("open('/etc/passwd')", {}, "ended with 1:"),
        ("import socket; socket.create_connection(('127.0.0.1', 22))", {}, "PermissionError: [Errno 1]"),
        ("import socket; socket.socket(socket.AF_UNIX)", {}, "PermissionError: [Errno 1]"),
        ("while True: print('x' * 1000)", {"output": 10_000}, "printed more than 10,000 bytes"),
        ("for _ in range(1 << 10): print('x' * (1 << 20))", {}, "printed more than 1,048,576 bytes"),
        ("import sys\nfor _ in range(20000): sys.stderr.write('x' * 1000)", {}, "printed more than 1,048,576 bytes"),
        ("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))", {"file_size": MEGABYTE}, "SIGXFSZ|File too large"),
        ("kept = [open('main.py') for _ in range(1000)]", {}, "Too many open files"),
        (f"{THREAD}\nwhile True: begin()", {}, "new thread"),
        ("import os; os.kill(os.getppid(), 9)", {}, "ended with 1:"),
        ("import os; os.kill(-1, 9)", {}, "ended with 1: PermissionError"),
        ("import os; os.abort()", {}, "ended by SIGABRT"),
        ("import sys; sys.exit(7)", {}, "ended with 7"),
    ],
)  # fmt: skip
def test_what_is_contained(sandbox: Sandbox, source: str, limits: dict, reason: str) -> None:
    outcome = sandbox.run(program(source, **limits))
    assert outcome.reason
    wanted = reason.split("|")
    if "SIGXFSZ" in reason:
        wanted.append("wrote a file larger than 1 MB")
    assert any(text in outcome.reason for text in wanted), outcome.reason


def test_a_fork_bomb_where_processes_are_allowed(sandbox: Sandbox) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    outcome = sandbox.run(program(bomb, may_fork=True, processes=16, wall=0.5))
    assert outcome.reason == "took longer than 0.5 seconds"


def test_what_steps_aside_is_killed_too(sandbox: Sandbox) -> None:
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
"""
    assert not sandbox.run(program(daemon, may_fork=True)).reason, "and the fixture sees that nothing is left"


def test_files_of_others_stay_unseen(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    secret.chmod(0o666)
    attempts = f"""
import os
done = []
for act in (
    lambda: open({str(secret)!r}).read(),
    lambda: open({str(secret)!r}, "w"),
    lambda: os.unlink({str(secret)!r}),
    lambda: os.symlink({str(secret)!r}, "link") or open("link").read(),
    lambda: os.link({str(secret)!r}, "hard"),
    lambda: open({str(secret) + "-new"!r}, "w"),
    lambda: open({str(Path.home() / ".bashrc")!r}).read(),
    lambda: open("/proc/{os.getpid()}/environ").read() or 1 / 0,
    lambda: os.chroot("."),
    lambda: os.listdir({str(tmp_path)!r}),
):
    try:
        done.append(act())
    except OSError:
        pass
print(done)
"""
    outcome = sandbox.run(program(attempts))
    assert outcome.out == "[]\n", (outcome.out, outcome.err)
    assert secret.read_text() == "a secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "temporary"]


def test_no_server_of_the_machine_can_be_reached(sandbox: Sandbox, tmp_path: Path) -> None:
    path = Path("/tmp") / f"braid-{os.getpid()}.socket"
    with socket.socket(socket.AF_INET) as tcp, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        local.bind(str(path))
        try:
            attempts = f"""
import socket
pair = socket.socketpair()
for act in (
    lambda: socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]})),
    lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"x", {str(path)!r}),
    lambda: pair[0].connect({str(path)!r}),
):
    try:
        act()
        print("reached")
    except OSError:
        pass
"""
            outcome = sandbox.run(program(attempts))
            assert (outcome.out, outcome.err) == ("", "")
        finally:
            path.unlink()


def test_the_disk_is_small(sandbox: Sandbox) -> None:
    source = "import time\nfor i in range(100):\n  open(str(i), 'wb').write(bytes(1 << 20))\n  time.sleep(0.01)"
    reason = sandbox.run(Program(program(source).files, program(source).steps, disk=8 * MEGABYTE)).reason
    assert (
        "No space left on device" if sandbox.isolation == "namespaces" else "wrote more than 8 MB of files"
    ) in reason


def test_steps_follow_each_other_while_they_succeed(sandbox: Sandbox) -> None:
    run = [sandbox_module.python(), "-I", "-S"]
    files = {"a.py": "print('first'); open('x', 'w').write('1')", "b.py": "print(open('x').read())", "c.py": "1 / 0"}
    a, b, c = (Step([*run, f"{{scratch}}/{name}", TOKEN], Limits(wall=20)) for name in files)
    outcome = sandbox.run(Program(files, [a, b]))
    assert (outcome.reason, outcome.out, outcome.steps) == ("", "1\n", 2)
    outcome = sandbox.run(Program(files, [a, c, b]))
    assert (outcome.reason, outcome.steps) == ("ended with 1: ZeroDivisionError: division by zero", 2)


def test_many_at_once_come_back_in_order(sandbox: Sandbox) -> None:
    programs = [program(f"print({index})") for index in range(6)]
    outcomes = sandbox.run_all(programs)
    assert [outcome.out for outcome in outcomes] == [f"{index}\n" for index in range(6)]


def test_a_command_that_is_not_there_is_no_sample(sandbox: Sandbox) -> None:
    with pytest.raises(BraidError, match="the sandbox broke down: /nowhere could not be started"):
        sandbox.run(Program({}, [Step(["/nowhere"])]))


def test_a_killed_launcher_takes_the_program_with_it(sandbox: Sandbox) -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            sandbox.run(program("import time; time.sleep(1000)", wall=60))
        except BraidError as error:
            caught.append(error)

    before = set(children(os.getpid()))
    thread = threading.Thread(target=run)
    thread.start()
    _wait_until(lambda: bool(ours()))
    for launcher in set(children(os.getpid())) - before:
        os.kill(launcher, 9)
    thread.join(20)
    _wait_until(lambda: not ours())
    assert "its launcher ended with -9" in str(caught[0])
    for folder in Path(sandbox_module.tempfile.gettempdir()).iterdir():  # Braid deletes what the launcher could not
        pytest.fail(f"{folder} is left")


def _wait_until(condition: object) -> None:
    for _ in range(200):
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def test_limits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = opened("none", monkeypatch)
    assert sandbox.run(program("while True: pass", wall=0.4)).reason == "took longer than 0.4 seconds"
    assert "MemoryError" in sandbox.run(program("data = bytearray(100 << 30)")).reason
    assert not ours()


def test_a_system_that_cannot_isolate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    opened("none", monkeypatch)
    tested = sandbox_module._tested

    def only_limits(sandbox: Sandbox) -> tuple[list[str], str | None]:
        return tested(sandbox) if sandbox.isolation == "none" else ([], "not here")

    monkeypatch.setattr(sandbox_module, "_tested", only_limits)
    with pytest.raises(BraidError) as error:
        Sandbox.open()
    assert "no way to isolate programs (namespaces: not here; landlock: not here)" in str(error.value)
    assert "code_isolation=best runs programs with what there is" in str(error.value)
    best = Sandbox.open("best")
    assert best.isolation == "none"
    assert "NOT prevented: reading files outside its folder, " in best.statement[-1]
    assert best.statement[:2] == ["isolation: seccomp and limits", "files and network: NOT isolated"]


def test_an_isolation_with_a_hole_is_used_only_as_the_best_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    holes = {"namespaces": None, "landlock": ["opening a socket"], "none": ["opening a socket", "starting a process"]}

    def tested(sandbox: Sandbox) -> tuple[list[str], str | None]:
        found = holes[sandbox.isolation]
        return ([], "not here") if found is None else (found, None)

    monkeypatch.setattr(sandbox_module, "_tested", tested)
    with pytest.raises(BraidError, match="namespaces: not here; landlock: does not prevent opening a socket"):
        Sandbox.open()
    best = Sandbox.open("best")
    assert (best.isolation, best.failures) == ("landlock", ("opening a socket",))
    assert best.statement[0] == "isolation: Landlock, seccomp and limits"
    holes.update(landlock=None, none=None)
    with pytest.raises(BraidError, match="programs cannot be run on this system"):
        Sandbox.open("best")


def test_a_hole_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    opened("none", monkeypatch)
    sandbox = Sandbox("none", True, ())
    failures, problem = sandbox_module._tested(sandbox)
    assert (failures, problem) == (["reading files outside its folder", "writing outside its folder"], None)
    monkeypatch.setattr(sandbox_module.kernel, "MACHINE", "riscv64")
    assert "not known" in str(sandbox_module._tested(sandbox)[1])


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BraidError, match="on Linux only, and this is darwin"):
        Sandbox.open()


AS_A_USER = """
import sys
sys.path.insert(0, sys.argv[1])
from braidlm.evals.sandbox.sandbox import *
sandbox = Sandbox.open()
def run(source, **limits):
    step = Step([python(), "-I", "-S", "{scratch}/main.py"], Limits(**limits))
    return sandbox.run(Program({"main.py": source}, [step]))
print(sandbox.isolation)
print(run("print(1 + 1)").out.strip())
print(run("import os\\nwhile True:\\n  try: os.fork()\\n  except OSError: pass", may_fork=True, wall=0.5).reason)
print(run("open('/usr/x', 'w')").reason != "", run("import socket; socket.socket()").reason)
"""


def test_as_an_ordinary_user() -> None:
    source = str(Path(sandbox_module.__file__).parents[3])
    if os.geteuid() != 0 or not os.path.exists(SYSTEM_PYTHON):
        pytest.skip("the other tests ran as an ordinary user, or there is no Python that one could run")
    done = subprocess.run(
        [SYSTEM_PYTHON, "-I", "-S", "-c", AS_A_USER, source], capture_output=True, text=True, user=65534, cwd="/"
    )
    if "ModuleNotFoundError" in done.stderr or "SyntaxError" in done.stderr:
        pytest.skip("this Python, or the source, is not for everybody")
    if "no way to isolate" in done.stderr:
        pytest.skip("users may not isolate anything on this system")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "2",
        "took longer than 0.5 seconds",
        "True ended with 1: PermissionError: [Errno 1] Operation not permitted",
    ]


def test_what_a_program_said_last() -> None:
    trace = "SyntaxError: Unexpected token ';'\n    at wrap (node:1:2)"
    node = f"/x/test.js:3\n  return a +;\n            ^\n\n{trace}\n\nNode.js v20.1.0\n"
    assert sandbox_module._error_line(node) == "SyntaxError: Unexpected token ';'"
    assert sandbox_module._error_line("a trace\nValueError: no\n\n") == "ValueError: no"
    assert sandbox_module._error_line("\n") == ""
