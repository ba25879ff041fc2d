"""Files and folders that are whole or not there: failures, full disks, kill -9."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from braidlm.core import files
from braidlm.core.errors import BraidError
from braidlm.core.files import (
    atomic_file,
    atomic_folder,
    explained_disk_errors,
    sha256_of,
    write_bytes,
    write_json,
    write_text,
    write_yaml,
)
from braidlm.core.reading import read_json, read_yaml

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def make(target: Path, text: str, replace: bool = False) -> None:
    with atomic_folder(target, replace=replace) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a.txt").write_text(text)


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "down" / "target"
    with atomic_folder(target) as folder:
        (folder / "a.txt").write_text("hello")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "a.txt").read_text() == "hello"
    assert list(target.parent.iterdir()) == [target]


def test_others_may_read_a_folder(tmp_path: Path) -> None:
    make(tmp_path / "target", "x")
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o755
    write_text(tmp_path / "file", "x")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_files_of_a_folder_have_one_mode_whoever_wrote_them(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "model.safetensors").touch(mode=0o600)  # as safetensors does from 0.8 on
        write_json(folder / "below" / "config.json", {})
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*.*")}
    assert modes == {0o644}


@pytest.mark.parametrize("error", [RuntimeError("no"), BraidError("no"), KeyboardInterrupt()], ids=repr)
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "target") as folder:
            (folder / "a.txt").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_and_kept(tmp_path: Path) -> None:
    make(tmp_path / "target", "old")
    with pytest.raises(BraidError, match="target: this folder exists already") as caught:
        make(tmp_path / "target", "new")
    assert "Choose another name or remove it first." in str(caught.value)
    assert (tmp_path / "target" / "inner" / "a.txt").read_text() == "old"


def test_a_replaced_folder_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "target"
    make(target, "old")
    with atomic_folder(target, replace=True) as folder:
        (folder / "b.txt").write_text("new")
        assert (target / "inner" / "a.txt").read_text() == "old"
    assert [path.name for path in target.iterdir()] == ["b.txt"]
    with pytest.raises(RuntimeError), atomic_folder(target, replace=True):
        raise RuntimeError("no")
    assert [path.name for path in target.iterdir()] == ["b.txt"]
    assert list(tmp_path.iterdir()) == [target]


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    make(target, "old")
    rename = os.rename

    def second_fails(source: Any, to: Any) -> None:
        if str(source).endswith(".part"):
            raise OSError(errno.EIO, "the disk failed")
        rename(source, to)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="the disk failed"):
        make(target, "new", replace=True)
    assert (target / "inner" / "a.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_explained_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    target = tmp_path / "target"
    monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(BraidError) as caught:
        make(target, "x")
    assert str(caught.value) == (
        f"{target}: the disk is full; nothing was written\nFree some space and run the same command again."
    )
    with pytest.raises(BraidError, match="the disk is full; nothing was written"):
        write_text(target, "x")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_inside_a_folder_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(BraidError) as caught, atomic_folder(target) as folder:
        write_text(folder / "a.txt", "x")
    assert str(caught.value).startswith(f"{target}: the disk is full; nothing was written\n")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", {"old": 1})
    monkeypatch.setattr(files.os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(BraidError, match="the disk is full"):
        write_json(tmp_path / "a.json", {"new": 1})
    assert read_json(tmp_path / "a.json") == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_real_full_device_is_explained() -> None:
    with pytest.raises(BraidError, match="the disk is full"), explained_disk_errors("/dev/full"):
        Path("/dev/full").write_text("x")


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_a_forbidden_place_is_explained(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for write in (lambda: make(tmp_path / "a" / "b", "x"), lambda: write_text(tmp_path / "c", "x")):
        with pytest.raises(BraidError, match="no permission to write here"):
            write()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_no_permission_is_explained_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(files.tempfile, "mkdtemp", failing(number))
    with pytest.raises(BraidError, match="no permission to write here") as caught:
        make(tmp_path / "target", "x")
    assert "Choose a folder you may write to." in str(caught.value)


def test_other_errors_of_the_system_are_not_disguised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="odd"), explained_disk_errors(tmp_path):
        raise OSError(errno.EIO, "odd")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("I/O error: No space left on device (os error 28)", "the disk is full"),
        ("I/O error: Read-only file system (os error 30)", "no permission to write here"),
    ],
)
def test_errors_that_safetensors_wraps_are_explained(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(BraidError, match=what), explained_disk_errors(tmp_path):
        raise SafetensorError(text)
    with pytest.raises(SafetensorError, match="odd"), explained_disk_errors(tmp_path):
        raise SafetensorError("odd")


@pytest.mark.parametrize("below", ["target", "deeper/target"])
def test_a_file_in_the_way_is_explained(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    for write in (lambda p: make(p, "x"), lambda p: write_text(p, "x")):
        with pytest.raises(BraidError, match="a file stands where a folder is needed"):
            write(tmp_path / "file" / below)


KILLED = """
import sys, time
from braidlm.core.files import atomic_folder
with atomic_folder(sys.argv[1], replace=sys.argv[2] == "replace") as folder:
    (folder / "a.txt").write_text("half")
    print("inside", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("mode", ["new", "replace"])
def test_kill_9_in_the_middle_leaves_nothing_that_looks_finished(tmp_path: Path, mode: str) -> None:
    target = tmp_path / "target"
    if mode == "replace":
        make(target, "old")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target), mode], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "inside\n"
        child.send_signal(signal.SIGKILL)
    if mode == "replace":
        assert (target / "inner" / "a.txt").read_text() == "old"
    else:
        assert not target.exists()
    left = [path.name for path in tmp_path.iterdir() if path != target]
    assert all(name.startswith(".target.") and name.endswith(".part") for name in left)
    make(target, "again", replace=True)
    assert (target / "inner" / "a.txt").read_text() == "again"
    assert list(tmp_path.iterdir()) == [target]


KILLED_BETWEEN = """
import os, signal, sys
from braidlm.core import files
rename = files.os.rename
def rename_and_die(source, to):
    rename(source, to)
    if str(to).endswith(".old"):
        os.kill(os.getpid(), signal.SIGKILL)
files.os.rename = rename_and_die
with files.atomic_folder(sys.argv[1], replace=True) as folder:
    (folder / "a.txt").write_text("new")
"""


def test_kill_9_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    target = tmp_path / "target"
    make(target, "old")
    done = subprocess.run([sys.executable, "-c", KILLED_BETWEEN, str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    with pytest.raises(BraidError, match="this folder exists already"):
        make(target, "another")
    assert (target / "inner" / "a.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_only_what_the_killed_left_of_this_folder_is_cleared(tmp_path: Path) -> None:
    others = [".target.part", ".target.more.abcdefgh.part", ".target.more.abcdefgh.old", ".other.abcdefgh.part"]
    for name in [*others, ".target.abcdefgh.part", ".target.bcdefghi.old"]:
        (tmp_path / name).mkdir()
    (tmp_path / ".target.cdefghij.part").write_text("half of a file")
    make(tmp_path / "target", "x", replace=True)
    assert {path.name for path in tmp_path.iterdir()} == {*others, "target"}


def test_a_folder_that_a_living_process_writes_is_let_be(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with atomic_folder(target, replace=True) as first:
        (first / "a.txt").write_text("first")
        make(target, "second", replace=True)
        assert (first / "a.txt").read_text() == "first"
    assert [path.name for path in target.iterdir()] == ["a.txt"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_killed_write_leaves_the_old_file(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from braidlm.core import files\n"
        "files.os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_text(sys.argv[1], 'new')\n"
    )
    write_text(tmp_path / "a.txt", "old")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.txt")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "a.txt").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    write_text(tmp_path / "a.txt", "another")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.txt"]


def test_a_file_that_a_living_process_writes_is_let_be(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a.txt") as first:
        first.write_text("first")
        write_text(tmp_path / "a.txt", "second")
        assert first.read_text() == "first"
    assert (tmp_path / "a.txt").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.txt"]


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_bytes(tmp_path / "deep" / "a.png", b"\x89PNG\r\n")
    assert (tmp_path / "deep" / "a.png").read_bytes() == b"\x89PNG\r\n"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.png"]


def test_json_is_written_for_people_and_read_back(tmp_path: Path) -> None:
    data = {"name": "Zoë", "list": [1, 2.5, None]}
    write_json(tmp_path / "a.json", data)
    assert "Zoë" in (tmp_path / "a.json").read_text(encoding="utf-8")
    assert read_json(tmp_path / "a.json") == data


def test_json_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(BraidError, match=r"a\.json: this file does not exist"):
        read_json(path)
    path.write_text('{"half": ')
    with pytest.raises(BraidError, match=r"a\.json: this is not valid JSON \(Expecting value: line 1"):
        read_json(path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(BraidError, match=r"a\.json: this is not UTF-8 text \(invalid start byte at byte"):
        read_json(path)


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("text", ["a red ball", "größer", "\U0001f98a", "\ud800", "true", "a: b\n- c"])
def test_yaml_is_read_back_the_same(text: str, tmp_path: Path) -> None:
    data = {"z": [text, 1e-5, None], "a": {text: True}}
    write_yaml(tmp_path / "a.yaml", data)
    assert list(read_yaml(tmp_path / "a.yaml").items()) == list(data.items()), "in its order"
