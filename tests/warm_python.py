"""A Python that has imported torch and transformers already, and nothing of Braid, for tests that start processes.

A process needs seconds to import these. `warm_python()`, and `braid` and `torchrun` in the same folder, are programs
that ask a server to fork: they take `-c`, `-m` or a file, arguments, input, output, environment and folder as Python
does, pass on SIGINT and SIGTERM, and take their process along when they are killed. Where the process itself is tested
(what it imports, its group, its terminal), use `sys.executable`.
"""

import contextlib
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

SHARED = "BRAID_TESTS_WARM"
"""The environment variable with the folder of the programs, for the processes of one run of the tests."""
PROGRAMS = {"python": [], "braid": ["-m", "braidlm"], "torchrun": ["-m", "torch.distributed.run"]}
IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run", "torch.distributed.checkpoint"),
    *("transformers", "transformers.modeling_utils", "transformers.generation", "hydra._internal.hydra"),
    *("rich.progress", "rich.table"),
)
_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = {{"python": {own!r}, "words": {words} + sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(server, [json.dumps(asked).encode() + b"\\n"], [0, 1, 2])
answers = server.makefile()
process = int(answers.readline())
for kind in (signal.SIGINT, signal.SIGTERM):
    signal.signal(kind, lambda kind, frame: os.kill(process, kind))
code = int(answers.readline())
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def warm_python() -> str:
    """The program to use in place of `sys.executable`."""
    return str(programs() / "python")


@functools.cache
def programs() -> Path:
    """The folder of the programs, once their server answers."""
    if SHARED not in os.environ:
        start()
    folder = Path(os.environ[SHARED])
    while not (folder / "ready").exists():
        time.sleep(0.05)
    return folder


def start() -> None:
    """Start the server of this process and of those that it starts, with which it ends."""
    from braidlm.model.bundle import bundle

    folder = Path(os.environ["HF_HOME"]) / "warm"
    folder.mkdir()
    address, own, code = str(folder / "socket"), str(folder / "python"), folder / "modeling_braid.py"
    for name, words in PROGRAMS.items():
        program = folder / name
        program.write_text(_PROGRAM.format(python=sys.executable, words=words, address=address, own=own))
        program.chmod(0o755)
    code.write_text(bundle())
    subprocess.Popen([sys.executable, "-I", __file__, folder], stdin=subprocess.PIPE)
    os.environ[SHARED] = str(folder)


def serve(folder: Path) -> None:
    """Fork for every program that asks, until the process that started this one has ended."""
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # what PYTHONPATH alone has is imported when it is needed
            import_module(name)
    import torch
    from transformers import dynamic_module_utils

    torch.set_num_threads(1)
    runpy.run_path(str(Path(__file__).parent / "compat" / "check_folder.py"))["parse_code_once"]()
    dynamic_module_utils.check_imports(folder / "modeling_braid.py")  # once for all
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    (folder / "ready").touch()
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            _answer(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _answer(connection: socket.socket) -> NoReturn:
    """Start a process, say its number and, once it has ended, its exit code."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not message.endswith(b"\n"):
        message += connection.recv(1 << 20)
    process = os.fork()
    if not process:
        connection.close()
        _run(descriptors, **json.loads(message))
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(f"{process}\n".encode())
    ended = os.pidfd_open(process)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(process, signal.SIGKILL)  # its program was killed
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _run(descriptors: list[int], python: str, words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Do what Python does with these words, in this process."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = python
    import torch
    from transformers import dynamic_module_utils

    # A fork has no threads of its own yet: several that make them at the same time find none ("Invalid thread pool!").
    torch.set_num_threads(torch.get_num_threads())
    # What transformers has read once.
    dynamic_module_utils.HF_MODULES_CACHE = environment.get("HF_MODULES_CACHE", dynamic_module_utils.HF_MODULES_CACHE)
    code: Any = None
    try:
        _run_words(words, environment.get("PYTHONPATH", ""))
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    _leave(1 if isinstance(code, str) else code or 0)


def _run_words(words: list[str], path: str) -> None:
    isolated = False
    while words[0] in ("-I", "-P", "-u"):
        isolated |= words.pop(0) == "-I"
    if not isolated:
        sys.path[:0] = ["", *filter(None, path.split(os.pathsep))]
    kind, *sys.argv = words if words[0] in ("-c", "-m") else ("", *words)
    if kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _leave(code: int) -> NoReturn:
    """End as Python does, but for taking all modules apart."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
