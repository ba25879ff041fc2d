"""Data sets that are passed on in a password-protected archive, read without writing their text anywhere.

EWoK's authors ask that its plain text is not put where a crawler finds it, so that no model is trained on it. Its items
are read straight from the archive into memory.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from braidlm.core.errors import BraidError
from braidlm.evals.files.json_rows import TextFile, files_of


def protected_files(
    place: Path, inside: Sequence[str], passwords: Sequence[str], ending: str = ".jsonl"
) -> list[TextFile]:
    """The files of a zip, or of an unpacked folder; where there are several folders, of one called as `inside` says."""
    if place.is_dir():
        folders = [place / name for name in inside if (place / name).is_dir()]
        return files_of(folders[0] if folders and not any(place.glob(f"*{ending}")) else place, ending)
    try:
        with zipfile.ZipFile(place) as archive:
            return _members(archive, place, inside, passwords, ending)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise BraidError(
            f"this archive cannot be read ({error})", str(place), "Give the folder it unpacks to."
        ) from None


def _members(
    archive: zipfile.ZipFile, place: Path, inside: Sequence[str], passwords: Sequence[str], ending: str
) -> list[TextFile]:
    names = [name for name in archive.namelist() if name.endswith(ending)]
    ours = [name for name in names if set(PurePosixPath(name).parts[:-1]) & set(inside)]
    folders = {PurePosixPath(name).parent for name in names}
    if not ours and len(folders) == 1:
        ours = names  # an archive of one folder is taken for what was asked for
    if not ours:
        raise BraidError(f"there are no {ending} files of {' or '.join(inside)} in this archive", str(place))
    found = [
        TextFile(PurePosixPath(name).name, f"{place}/{name}", _content(archive, name, place, passwords))
        for name in ours
    ]
    return sorted(found, key=lambda file: file.name)


def _content(archive: zipfile.ZipFile, name: str, place: Path, passwords: Sequence[str]) -> bytes:
    for password in (None, *passwords):
        try:
            return archive.read(name, pwd=None if password is None else password.encode())
        except (RuntimeError, zipfile.BadZipFile) as error:  # a wrong password, noticed at once or by the checksum
            if isinstance(error, NotImplementedError):
                raise
    known = ", ".join(f"'{password}'" for password in passwords)
    raise BraidError(
        f"none of the known passwords ({known}) opens this archive", str(place), "Give the folder it unpacks to."
    )
