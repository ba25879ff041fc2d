"""The scratch folder: what is too much, and that any shape of it can be deleted."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from braidlm.evals.sandbox import isolation as scratch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scratch folder that is deleted after the test, with all else that is around it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch.scratch_folder() as made:
        yield Path(made)
    assert not list(tmp_path.iterdir())


def nest(folder: Path, depth: int) -> None:
    """Folders in folders, deeper than any path is long."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("x" * 100, dir_fd=at)
        below = os.open("x" * 100, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_files_are_measured(folder: Path) -> None:
    (folder / "inside").mkdir()
    (folder / "inside" / "data").write_bytes(bytes(1 << 16))
    assert scratch.exceeded(str(folder), 1 << 20) is None
    assert scratch.exceeded(str(folder), 1 << 15) == "disk"
    assert scratch.exceeded(str(folder / "gone"), 1) is None


@pytest.mark.parametrize(("limit", "files", "folders"), [("MAX_ENTRIES", 3, 2), ("MAX_FOLDERS", 0, 5)])
def test_files_and_folders_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str, files: int, folders: int
) -> None:
    for index in range(files):
        (folder / f"file{index}").touch()
    for index in range(folders):
        (folder / f"folder{index}").mkdir()
    monkeypatch.setattr(scratch, limit, 5)
    assert scratch.exceeded(str(folder), 1 << 30) is None
    monkeypatch.setattr(scratch, limit, 4)
    assert scratch.exceeded(str(folder), 1 << 30) == "entries"


def test_folders_deeper_than_paths_are_long(folder: Path) -> None:
    nest(folder, 60)
    assert scratch.exceeded(str(folder), 1 << 30) == "entries"


def test_what_permissions_and_links_hide_is_deleted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "kept").touch()
    (folder / "closed").mkdir()
    (folder / "closed" / "file").touch()
    (folder / "closed" / "below").mkdir()
    (folder / "link").symlink_to(outside)
    for name, mode in (("closed/below", 0o000), ("closed", 0o000)):
        (folder / name).chmod(mode)
    scratch.delete(str(folder))
    assert [path.name for path in outside.iterdir()] == ["kept"]
    folder.mkdir()


def test_a_folder_that_is_gone_needs_no_deletion(folder: Path) -> None:
    folder.rmdir()
