"""Programs that try to get out of the sandbox, to harm those outside, or to use more than they may.

VICTIM is a file of the user's outside the sandbox, FOLDER the folder of it, PARENT the process that runs the sandbox,
TOOL a file that may be read, SEGMENT shared memory of the user's (-1 without).
"""

import platform

_IN_ONE_PROGRAM = 8
_ATTEMPT = """
try:
    {}
    print("SUCCEEDED", flush=True)
except OSError:
    print("refused", flush=True)
"""
_NUMBERS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chmod": (90, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fchmodat": (268, 53),
    "fork": (57, None),
    "init_module": (175, 105),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "pidfd_open": (434, 434),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "sched_setattr": (314, 274),
    "semget": (64, 190),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "userfaultfd": (323, 282),
    "x32_getpid": (0x40000000 | 39, None),
}

PRELUDE = """
import ctypes, fcntl, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def checked(result):
    if result in (-1, 0xFFFFFFFFFFFFFFFF):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result

def call(name, *arguments):
    number = NUMBERS[name]
    if number is None:
        raise OSError("this machine has no such call")
    words = [ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_long(value) for value in arguments]
    return checked(libc.syscall(ctypes.c_long(number), *words))

def opened(path, flags=os.O_RDONLY):
    return os.open(path, flags)

def alien_descriptors():
    found = []
    for number in range(3, 1024):
        try:
            os.fstat(number)
            found.append(number)
        except OSError:
            pass
    if not found:
        raise OSError("none")

def sigio():
    read, write = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, PARENT)
    fcntl.fcntl(read, 10, signal.SIGKILL)
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(write, b"x")

def shell():
    if os.system("true"):
        raise OSError("no shell")

def forked():
    if os.fork() == 0:
        os._exit(0)
"""

ATTEMPTS = {
    # files
    "read": "open(VICTIM).read()",
    "write": "open(VICTIM, 'w')",
    "append": "open(VICTIM, 'a')",
    "open by path alone": "os.pread(os.open(VICTIM, os.O_PATH), 1, 0)",
    "unlink": "os.unlink(VICTIM)",
    "rename": "os.rename(VICTIM, VICTIM + '.new')",
    "take over": "os.rename(VICTIM, 'mine')",
    "replace": "open('mine', 'w').close() or os.rename('mine', VICTIM)",
    "hard link": "os.link(VICTIM, 'hard')",
    "symbolic link": "os.symlink(VICTIM, 'soft') or open('soft').read()",
    "truncate": "os.truncate(VICTIM, 0)",
    "truncate while opening": "opened(VICTIM, os.O_RDONLY | os.O_TRUNC)",
    "truncate what may be read": "opened(TOOL, os.O_RDONLY | os.O_TRUNC)",
    "write what may be read": "opened(TOOL, os.O_WRONLY)",
    "list": "os.listdir(FOLDER)",
    "new file": "open(FOLDER + '/new', 'w')",
    "new folder": "os.mkdir(FOLDER + '/new')",
    "new pipe": "os.mkfifo(FOLDER + '/new')",
    "remove folder": "os.rmdir(FOLDER + '/empty')",
    "system file": "opened('/etc/shadow')",
    "users": "opened('/etc/passwd')",
    "way up": "os.chdir('/proc/1/root') or open(VICTIM).read()",
    "handle": "call('open_by_handle_at', -100, b'x' * 64, 0)",
    "another open": "call('openat2', -100, VICTIM.encode(), struct.pack('QQQ', 0, 0, 0), 24)",
    # modes, owners, times, attributes
    "chmod": "os.chmod(VICTIM, 0o777)",
    "chmod by number": "call('fchmodat', -100, VICTIM.encode(), 0o777)",
    "chmod of a folder": "os.chmod(FOLDER, 0o777)",
    "chmod by descriptor": "os.fchmod(opened(TOOL), 0o777)",
    "chown": "os.chown(VICTIM, os.getuid(), os.getgid())",
    "utime": "os.utime(VICTIM, (0, 0))",
    "utime now": "os.utime(FOLDER)",
    "set attribute": "os.setxattr(VICTIM, 'user.x', b'1')",
    "remove attribute": "os.removexattr(VICTIM, 'user.victim')",
    "chattr": "fcntl.ioctl(opened(TOOL), 0x40086602, struct.pack('l', 0x40))",
    "lease": "fcntl.fcntl(opened(TOOL), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    # processes
    "fork": "forked()",
    "fork by number": "call('fork')",
    "clone": "call('clone', 17, 0, 0, 0, 0)",
    "clone3": "call('clone3', struct.pack('QQQQQQQQ', 0, 0, 0, 0, 17, 0, 0, 0), 64)",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "shell": "shell()",
    "kill parent": "os.kill(PARENT, 9)",
    "stop parent": "os.kill(PARENT, signal.SIGSTOP)",
    "kill launcher": "os.kill(os.getppid(), 9)",
    "kill all": "os.kill(-1, 9)",
    "kill group": "os.killpg(0, 9)",
    "tgkill": "call('tgkill', PARENT, PARENT, 9)",
    "tkill": "call('tkill', PARENT, 9)",
    "queue a signal": "call('rt_sigqueueinfo', PARENT, 9, bytes(128))",
    "signal by pidfd": "signal.pidfd_send_signal(call('pidfd_open', PARENT, 0), 9)",
    "signal by a pipe": "sigio()",
    "trace": "call('ptrace', 16, PARENT, 0, 0)",
    "read memory": "call('process_vm_readv', PARENT, bytes(16), 1, bytes(16), 1, 0)",
    "write memory": "call('process_vm_writev', PARENT, bytes(16), 1, bytes(16), 1, 0)",
    "memory file": "opened(f'/proc/{PARENT}/mem', os.O_RDWR)",
    "environment of others": "open('/proc/1/environ', 'rb').read()[0]",
    "out of memory score": "open(f'/proc/{PARENT}/oom_score_adj', 'w').write('1000')",
    "limits of others": "call('prlimit64', PARENT, 7, struct.pack('QQ', 8, 8), 0)",
    "priority": "os.setpriority(os.PRIO_PROCESS, PARENT, 19)",
    "priority of the user": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "affinity": "os.sched_setaffinity(PARENT, {min(os.sched_getaffinity(0))})",
    "scheduler": "os.sched_setscheduler(PARENT, os.SCHED_IDLE, os.sched_param(0))",
    "scheduler by attributes": "call('sched_setattr', PARENT, struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0)",
    "io priority": "call('ioprio_set', 1, PARENT, 3 << 13)",
    "pages": "call('move_pages', PARENT, 0, 0, 0, 0, 0)",
    "compare": "call('kcmp', PARENT, os.getpid(), 2, 0, 0)",
    # devices and descriptors
    "disk": "opened('/dev/vda')",
    "memory device": "opened('/dev/mem')",
    "terminal": "opened('/dev/tty')",
    "virtual machines": "opened('/dev/kvm')",
    "new device": "os.mknod('device', 0o60666, os.makedev(8, 0))",
    "type into the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "descriptors of others": "alien_descriptors()",
    # memory that is shared
    "shared memory": "opened('/dev/shm/braid-hostile', os.O_RDWR | os.O_CREAT)",
    "System V memory": "call('shmget', 0, 4096, 0o1666)",
    "memory of the user": "call('shmat', SEGMENT, 0, 0)",
    "remove memory of the user": "call('shmctl', SEGMENT, 0, 0)",
    "System V queue": "call('msgget', 0, 0o1666)",
    "semaphores": "call('semget', 0, 1, 0o1666)",
    "message queue": "call('mq_open', b'braid-hostile', 0o102, 0o666, 0)",
    "memory without a limit": "call('memfd_create', b'x', 0)",
    # network
    "TCP": "socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
    "UDP": "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "local socket": "socket.socket(socket.AF_UNIX)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "host": "socket.socket(40, socket.SOCK_STREAM)",
    "datagrams": "socket.socketpair(type=socket.SOCK_DGRAM)",
    # namespaces and mounts
    "user namespace": "checked(libc.unshare(0x10000000))",
    "mount namespace": "checked(libc.unshare(0x00020000))",
    "network namespace": "checked(libc.unshare(0x50000000))",
    "namespace by clone": "call('clone', 0x10000000 | 17, 0, 0, 0, 0)",
    "namespace of others": "checked(libc.setns(opened('/proc/1/ns/mnt'), 0))",
    "mount": "checked(libc.mount(b'none', b'.', b'tmpfs', 0, None))",
    "unmount": "checked(libc.umount2(b'/', 2))",
    "another root": "call('pivot_root', b'.', b'.')",
    "chroot": "os.chroot('.')",
    "name of the machine": "checked(libc.sethostname(b'mine', 4))",
    "attributes": "os.getxattr(TOOL, 'user.x')",
    "names of attributes": "os.listxattr(TOOL)",
    "a descriptor on its way": "socket.socketpair()[0].sendmsg([b'x'])",
    "hiding open files": "checked(libc.prctl(4, 0, 0, 0, 0))",
    # the kernel
    "key": "call('add_key', b'user', b'braid', b'x', 1, -3)",
    "keyring": "call('keyctl', 1, 0)",
    "key of others": "call('request_key', b'user', b'braid', 0, -3)",
    "io_uring": "call('io_uring_setup', 4, bytes(120))",
    "asynchronous io": "call('io_setup', 128, bytes(8))",
    "bpf": "call('bpf', 0, bytes(72), 72)",
    "performance": "call('perf_event_open', bytes(128), 0, -1, -1, 0)",
    "page faults": "call('userfaultfd', 1)",
    "module": "call('init_module', b'', 0, b'')",
    "messages": "call('syslog', 3, bytes(64), 64)",
    "quota": "call('quotactl', 0, b'/dev/vda', 0, 0)",
    "reboot": "call('reboot', 0, 0, 0, 0)",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "watching files": "checked(libc.inotify_add_watch(checked(libc.inotify_init()), FOLDER.encode(), 0xFFF))",
    "the other way to call": "call('x32_getpid')",
}  # fmt: skip
"""Expressions that must raise an OSError."""

_THREADS = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
_MAPS = "import mmap\nkept = []\nwhile True:\n    kept.append(mmap.mmap(-1, 1 << 24)); kept[-1].write(bytes(1 << 24))"
_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
_DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(99)\n    os._exit(0)"
_ADRIFT = (
    "import os, signal, time\nfor _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n        signal.pause()"
)
_LARGE_FILE = "f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))"
_FULL_DISK = "for i in range(999): open(str(i), 'wb').write(bytes(1 << 20))"
_UNNAMED = """
import mmap, os, time
for i in range(60):
    file = os.open(str(i), os.O_RDWR | os.O_CREAT)
    for _ in range(15):
        os.write(file, bytes(1 << 20))
    KEEP
    os.unlink(str(i))
time.sleep(9)
"""
_UNLINKED = _UNNAMED.replace("KEEP", "")
_MAPPED = _UNNAMED.replace("KEEP", "kept = [*(kept if i else []), mmap.mmap(file, 4096)]; os.close(file)")
_IN_THREADS = """
import ctypes, os, threading, time
def work(i):
    ctypes.CDLL(None).syscall(NUMBER, 2**31 - 1, 2**31 - 1, 2)  # close_range: this thread has descriptors of its own
    file = os.open(str(i), os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(15):
            os.write(file, bytes(1 << 20))
    except OSError as error:
        os.write(2, str(error).encode())
        os._exit(1)
    os.unlink(str(i))
    time.sleep(9)
for i in range(16):
    threading.Thread(target=work, args=(i,)).start()
""".replace("NUMBER", "436")
_FULL = "more than 64 MB of files|No space left"
_TOO_MANY = "made more than 10,000 files or 1,000 folders|No space left"

FLOODS: dict[str, tuple[str, dict, str]] = {
    "processor": ("while True: pass", {"wall": 0.4}, "took longer than 0.4 seconds"),
    "sleep": ("import time; time.sleep(99)", {"wall": 0.4}, "took longer than 0.4 seconds"),
    "memory": ("data = []\nwhile True: data.append(bytearray(1 << 20))", {"memory": 64 << 20}, "MemoryError"),
    "memory at once": ("data = bytearray(100 << 30)", {}, "MemoryError"),
    "maps": (_MAPS, {"memory": 100 << 20, "memory_is_watched": True}, "used more than 100 MB of memory"),
    "threads": (_THREADS, {}, "new thread"),
    "output": ("while True: print('x' * 9999)", {"output": 10_000}, "printed more than 10,000 bytes"),
    "errors": ("import os\nwhile True: os.write(2, b'x' * 9999)", {"output": 10_000}, "printed more than 10,000 bytes"),
    "a large file": (_LARGE_FILE, {"file_size": 1 << 20}, "larger than 1 MB|File too large"),
    "open files": ("kept = [open('main.py') for _ in range(999)]", {}, "Too many open files"),
    "fork bomb": (_BOMB, {"may_fork": True, "processes": 12, "wall": 0.5}, "took longer than 0.5 seconds"),
    "daemon": (_DAEMON, {"may_fork": True}, ""),
    "processes adrift": (_ADRIFT, {"may_fork": True}, ""),
    "core dump": ("import os; os.abort()", {}, "ended by SIGABRT"),
    "folders in folders": ("import os\nwhile True: os.mkdir('x'); os.chdir('x')", {}, _TOO_MANY),
    "folders": ("import os\nfor i in range(60000): os.mkdir(str(i))", {}, _TOO_MANY),
    "hidden folders": ("import os\nos.mkdir('x', 0o300)\nfor i in range(60000): os.mkdir(f'x/{i}')", {}, _TOO_MANY),
    "files": ("for i in range(60000): open(str(i), 'w').close()", {}, _TOO_MANY),
    "full disk": (_FULL_DISK, {}, _FULL),
    "files without a name": (_UNLINKED, {}, _FULL),
    "mapped files without a name": (_MAPPED, {}, _FULL),
    "files without a name in threads": (_IN_THREADS, {"wall": 3}, _FULL),
}  # fmt: skip
"""Programs, limits, and what is said of them ("|" between the words of different isolations); "" for those that end."""


def sources(**context: object) -> list[tuple[list[str], str]]:
    """Some attempts after another as one program, which prints for each whether it was refused or succeeded."""
    machine = ("x86_64", "aarch64").index(platform.machine())
    numbers = {call: each[machine] for call, each in _NUMBERS.items()}
    constants = "".join(f"{key} = {value!r}\n" for key, value in {"NUMBERS": numbers, **context}.items())
    names = list(ATTEMPTS)
    groups = [names[start : start + _IN_ONE_PROGRAM] for start in range(0, len(names), _IN_ONE_PROGRAM)]
    return [
        (group, constants + PRELUDE + "".join(_ATTEMPT.format(ATTEMPTS[name]) for name in group)) for group in groups
    ]
