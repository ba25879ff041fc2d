"""Data sets in password-protected archives, read without writing their plain text to disk.

EWoK's authors ask that its plain text is not published where a crawler finds it, so that no model is trained on it. Its
items are read from the archive into memory.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from braidlm.core.errors import BraidError
from braidlm.evals.files.text_files import TextFile, files_of


def protected_files(path: Path, folder_names: Sequence[str], passwords: Sequence[str]) -> list[TextFile]:
    """The files of a zip or an unpacked folder; where it has several folders, those of one of `folder_names`."""
    if path.is_dir():
        folders = [path / name for name in folder_names if (path / name).is_dir()]
        return files_of(folders[0] if folders and not any(path.glob("*.jsonl")) else path)
    try:
        with zipfile.ZipFile(path) as archive:
            return _members(archive, path, folder_names, passwords)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise BraidError(
            f"this archive cannot be read ({error})", str(path), "Give the folder it unpacks to."
        ) from None


def _members(
    archive: zipfile.ZipFile, path: Path, folder_names: Sequence[str], passwords: Sequence[str]
) -> list[TextFile]:
    names = [name for name in archive.namelist() if name.endswith(".jsonl")]
    wanted = [name for name in names if set(PurePosixPath(name).parts[:-1]) & set(folder_names)]
    folders = {PurePosixPath(name).parent for name in names}
    if not wanted and len(folders) == 1:
        wanted = names  # an archive of a single folder may have another name
    if not wanted:
        raise BraidError(f"there are no .jsonl files of {' or '.join(folder_names)} in this archive", str(path))
    files = [
        TextFile(PurePosixPath(name).name, f"{path}/{name}", _content(archive, name, path, passwords))
        for name in wanted
    ]
    return sorted(files, key=lambda file: file.name)


def _content(archive: zipfile.ZipFile, name: str, path: Path, passwords: Sequence[str]) -> bytes:
    for password in (None, *passwords):
        try:
            return archive.read(name, pwd=None if password is None else password.encode())
        except (RuntimeError, zipfile.BadZipFile) as error:  # a wrong password is noticed at once or by the checksum
            if isinstance(error, NotImplementedError):
                raise
    known = ", ".join(f"'{password}'" for password in passwords)
    raise BraidError(
        f"none of the known passwords ({known}) opens this archive", str(path), "Give the folder it unpacks to."
    )
