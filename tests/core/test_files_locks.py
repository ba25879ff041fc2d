"""Locks of folders: one process holds one, others wait for it, and nobody waits for a process that has ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from braidlm.core import files
from braidlm.core.files import LockedError, locked_folder

pytest.importorskip("fcntl")

HOLDER = "import sys, time; from pathlib import Path; from braidlm.core.files import LockedError, locked_folder\n"
HOLDER += "with locked_folder(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


@contextmanager
def holder(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the folder's lock until it is killed."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_waits_until_the_holder_ends_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "REMINDER_SECONDS", 0.5)
    with holder(tmp_path) as process:
        started = time.monotonic()
        threading.Timer(1.2, process.kill).start()
        with locked_folder(tmp_path):
            assert process.wait() == -signal.SIGKILL
        assert 1.0 < time.monotonic() - started < 20
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Another process is at work in {tmp_path}. Waiting for it to end."
    assert 1 <= len(lines[1:]) <= 3
    assert all(line.startswith(f"Still waiting for {tmp_path} after ") for line in lines[1:])


def test_ctrl_c_ends_the_waiting(tmp_path: Path) -> None:
    with holder(tmp_path):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt), locked_folder(tmp_path):
            pytest.fail("the lock is another process's")


def fail_in(folder: Path, written: bool) -> None:
    with locked_folder(folder):
        if written:
            (folder / "part").write_text("")
        raise ZeroDivisionError


def test_work_that_fails_leaves_no_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    folder = tmp_path / "there" / "cache" / "work"
    for written in (False, True):
        with pytest.raises(ZeroDivisionError):
            fail_in(folder, written)
        assert folder.exists() == written
        assert folder.parent.exists() == written
    assert (tmp_path / "there").exists()


def test_a_folder_of_another_process_is_refused(tmp_path: Path) -> None:
    with holder(tmp_path), pytest.raises(LockedError) as caught, locked_folder(tmp_path, "train", "with out=DIR"):
        pass
    assert caught.value.lines() == [
        f"{tmp_path}: another `braid train` is at work here",
        "Wait for it to end, or choose another with out=DIR.",
    ]
    with locked_folder(tmp_path, "train", "with out=DIR"):
        pass
