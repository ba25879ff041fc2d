"""The program that tests an isolation: it attempts what must not be possible, and prints what succeeded."""

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

def write():
    with open(canary, "w") as file:
        file.write("no bird")

def beside():
    with open(canary + "-beside", "w") as file:
        file.write("an egg")

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
attempt("write", write)
attempt("write", beside)
attempt("mode", lambda: os.chmod(canary, 0o644))
attempt("mode", lambda: os.utime(canary))
attempt("socket", socket)
attempt("process", process)
attempt("signal", lambda: os.kill(other, 0))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, other, 1))
with open("here", "w") as file:
    file.write("what is allowed")
print(json.dumps(found))
"""


def probe(canary: str, home: str | None, other: int) -> str:
    """Its source, with a file that it must neither read nor change, one of the user's, and a process to signal."""
    return _PROBE.format(arguments=(canary, home, other))
