"""Nothing but the sandbox needs what only POSIX has, so that the rest can run on macOS and Windows. Read from the
sources: imports and names of `os` and `signal`, at any place without a fallback."""

import ast
from collections.abc import Iterator

import pytest

from tests.contract.test_floors import FILES, SOURCE, parsed

SANDBOX = SOURCE / "evals" / "sandbox"
LAUNCHER = SANDBOX / "launcher.py"
"""A process of its own, which starts on Linux only; the other files are imported by tasks."""
MODULES = {"crypt", "curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "syslog"}
MODULES |= {"termios", "tty"}
NAMES = {
    "os": "chown chroot confstr ctermid fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid "
    "getpgrp getpriority getresuid getsid getuid killpg lchown lockf memfd_create mkfifo mknod nice openpty pipe2 "
    "posix_fadvise posix_fallocate posix_spawn pread pwrite register_at_fork sched_getaffinity sched_setaffinity "
    "sendfile setegid seteuid setgid setpgid setpriority setsid setuid statvfs sync sysconf uname wait wait3 wait4 "
    "O_CLOEXEC O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC WNOHANG",
    "signal": "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIGWINCH SIGXCPU "
    "SIGXFSZ alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait",
}


def needs(tree: ast.AST, in_functions: bool = True, caught: str = "") -> Iterator[tuple[int, str]]:
    """Line and name of all that Windows has not; `caught` are the errors that the code around it has a fallback for."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not in_functions:
            continue
        if isinstance(node, ast.Try):
            handled = " ".join(ast.unparse(one.type or ast.Name("ImportError AttributeError")) for one in node.handlers)
            yield from needs(ast.Module(node.body, []), in_functions, f"{caught} {handled}")
            yield from needs(ast.Module([*node.handlers, *node.orelse, *node.finalbody], []), in_functions, caught)
            continue
        around = caught
        if isinstance(node, ast.With):
            items = [ast.unparse(item.context_expr) for item in node.items]
            around = " ".join([caught, *(item for item in items if "suppress(" in item)])
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        if "ImportError" not in around:
            yield from ((node.lineno, name) for name in names if name in MODULES or is_missing(name))  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and "AttributeError" not in around:
            name = f"{node.value.id}.{node.attr}"
            yield from [(node.lineno, name)] if is_missing(name) else []
        yield from needs(node, in_functions, around)


def is_missing(name: str) -> bool:
    """Whether Windows has no such function or constant."""
    module, _, own = name.partition(".")
    return own in NAMES.get(module, "").split()


def test_no_file_needs_what_only_posix_has() -> None:
    for path in FILES:
        if path != LAUNCHER:
            found = list(needs(parsed(path), in_functions=SANDBOX not in path.parents))
            assert not found, f"{path}: Windows has no {found}: give it a fallback, or put it into the sandbox"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import fcntl", ["fcntl"]),
        ("def f():\n    from resource import getrusage", ["resource"]),
        ("from os import fork", ["os.fork"]),
        ("import os\nwhile True:\n    os.kill(1, signal.SIGKILL)", ["signal.SIGKILL"]),
        ("try:\n    import fcntl\nexcept ImportError:\n    fcntl = None", []),
        ("try:\n    import fcntl\nexcept OSError:\n    import pwd", ["fcntl", "pwd"]),
        ("with contextlib.suppress(ImportError):\n    import readline", []),
        ("try:\n    os.nice(1)\nexcept (OSError, AttributeError):\n    pass", []),
        ("getattr(os, 'nice', abs)(1)\nos.kill(1, signal.SIGTERM)", []),
    ],
)
def test_what_is_found(source: str, found: list[str]) -> None:
    assert [name for _, name in needs(ast.parse(source))] == found
