"""The files of a data set in memory, with a hash over all of them, and the rows of JSONL files and tables.

Files may be compressed with gzip, or in a password-protected archive. Each row knows its file and line number, so that
errors can name them.
"""

import csv
import hashlib
import io
import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.reading import parse_json, parse_row, read_bounded
from braidlm.data.sources.files import open_bytes


@dataclass(frozen=True)
class TextFile:
    """A file of a data set, from a folder or an archive."""

    name: str
    """The name without folders, with its extension."""
    where: str
    """The location, for error messages."""
    content: bytes

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    @property
    def text(self) -> str:
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BraidError(f"this is not UTF-8 text ({error.reason} at byte {error.start})", self.where) from None


def files_of(
    path: Path | str, pattern: str = "*.jsonl", example: str | None = None, below: bool = False
) -> list[TextFile]:
    """One file, or the files of a folder that match a pattern; with `below` in all folders inside too, and `.gz` ones.

    A file that ends with `.gz` is unpacked.
    """
    path = Path(path)
    found = {*path.rglob(pattern), *path.rglob(f"{pattern}.gz")} if below else path.glob(pattern)
    paths = [path] if not path.is_dir() else sorted(found)
    if not paths:
        todo = example and f"A line of such a file is {example}."
        raise BraidError(f"there are no {pattern.removeprefix('*')} files here", str(path), todo)
    files = []
    for file in paths:
        with open_bytes(str(file)) as opened:
            content = read_bounded(opened, file)
        files.append(TextFile(file.name.removesuffix(".gz"), str(file), content))
    return files


def sha256_of_files(files: Sequence[TextFile]) -> str:
    """One hash over names and contents."""
    lines = [f"{file.name} {hashlib.sha256(file.content).hexdigest()}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Row:
    fields: dict[str, Any]
    stem: str
    where: str
    """File and line number."""
    example: str | None = None
    """An example of a line, for error messages."""

    def text(self, key: str) -> str:
        """A sentence."""
        return self._expected(key, "a sentence", _is_sentence(self.value(key)))

    def number(self, key: str) -> float:
        """A number, or a text that is one."""
        value = self.value(key)
        try:
            number = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            number = math.nan
        self._expected(key, "a number", math.isfinite(number))
        return number

    def texts(self, key: str, least: int = 2) -> list[str]:
        """Two sentences or more, or any number."""
        value = self.value(key)
        valid = isinstance(value, list) and len(value) >= least and all(map(_is_sentence, value))
        return self._expected(key, "a list of two sentences or more" if least == 2 else "a list of sentences", valid)

    def inner(self, key: str) -> "Row":
        """An object inside the row."""
        return replace(self, fields=self._expected(key, "an object", isinstance(self.value(key), dict)))

    def label(self, key: str, labels: Sequence[str | int]) -> int:
        """The index of a field's value among the labels; numbers may be written as text."""
        value = self.value(key)
        names = [str(label) for label in labels]
        name = str(value).strip()
        self._expected(key, f"one of {', '.join(names)}", not isinstance(value, bool) and name in names)
        return names.index(name)

    def value(self, key: str) -> Any:
        """The value of a field, of any type."""
        if key not in self.fields:
            raise self.error(f"there is no '{key}'.{did_you_mean(key, self.fields).replace('There are', 'It has')}")
        return self.fields[key]

    def _expected(self, key: str, what: str, valid: bool) -> Any:
        """The value of a field if it is valid; else an error that says what it is to be."""
        if not valid:
            raise self.error(f"'{key}' is to be {what}, not {short(self.fields[key])}")
        return self.fields[key]

    def error(self, what: str) -> BraidError:
        return BraidError(what, self.where, self.example and f"A line is {self.example}.")


def _is_sentence(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


@dataclass(frozen=True)
class Rows:
    """All rows of some files, in the order of the files' names."""

    rows: list[Row]
    sha256: str

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def rows_of(files: Sequence[TextFile], path: Path | str, example: str) -> Rows:
    """Parse every line as an object."""
    rows = [row for file in files for row in json_rows(file, example)]
    if not rows:
        raise BraidError("the files are empty", str(path))
    return Rows(rows, sha256_of_files(files))


def short(value: Any) -> str:
    """The beginning of a value, for error messages."""
    return json.dumps(value, ensure_ascii=False)[:40]


def json_rows(file: TextFile, example: str | None = None) -> Iterator[Row]:
    """The objects of a JSONL file."""
    # Only a newline ends a line: other line separators of Unicode may occur within a sentence.
    for number, line in enumerate(file.text.replace("\r\n", "\n").split("\n"), 1):
        if line.strip():
            row = Row({}, file.stem, f"{file.where}, line {number}", example)
            yield replace(row, fields=parse_row(line, row.where, row.error("").todo))


def table_rows(
    file: TextFile, columns: Sequence[str] | None = None, example: str | None = None, needed: Sequence[str] = ()
) -> Iterator[Row]:
    """The rows of a table: tab-separated (`.tsv`), where quotes have no meaning, or comma-separated.

    The first line names the columns, among them those `needed`, unless `columns` are given; a column with an empty name
    is not read.
    """
    lines = csv.reader(io.StringIO(file.text, newline=""))
    table: Iterable[tuple[int, list[str]]] = ((lines.line_num, cells) for cells in lines)
    if file.name.endswith(".tsv"):
        table = enumerate((line.rstrip("\r").split("\t") for line in file.text.split("\n")), 1)
    for number, cells in table:
        if not any(cell.strip() for cell in cells):
            continue
        # Also where columns are given there may be a heading, as in GLUE's own SST-2.
        if columns is None or {name for name in columns if name} <= {cell.strip() for cell in cells}:
            columns = tuple(cell.strip() for cell in cells)
            for name in needed:
                if name not in columns:
                    known = did_you_mean(name, columns).replace("There are", "It has")
                    raise BraidError(f"there is no column '{name}'.{known}", file.where)
            continue
        row = Row({}, file.stem, f"{file.where}, line {number}", example)
        if len(cells) != len(columns):
            raise row.error(f"this line has {len(cells)} columns, not {len(columns)}")
        yield replace(row, fields={name: cell for name, cell in zip(columns, cells, strict=True) if name})


def read_rows(path: Path | str, example: str) -> Rows:
    """The objects of all JSONL files of a folder, or of one file."""
    return rows_of(files_of(path, example=example), path, example)


def question_rows(path: Path, example: str) -> Rows:
    """The rows of all JSONL files of a folder, or of one file, which may also be JSON with lists of objects."""
    if path.suffix != ".json":
        return read_rows(path, example)
    (file,) = files = files_of(path)
    content = parse_json(file.text, file.where, expect=object)
    lists = {"": content} if isinstance(content, list) else content if isinstance(content, dict) else {}
    rows = []
    for name, items in lists.items():
        for number, item in enumerate(items if isinstance(items, list) else (), 1):
            row = Row({}, file.stem, f"{file.where}, {f'{name}, ' if name else ''}item {number}", example)
            if not isinstance(item, dict):
                raise row.error(f"this is not an object but {short(item)}")
            rows.append(replace(row, fields=item))
    if not rows:
        raise BraidError("the file has no lists of objects", str(path))
    return Rows(rows, sha256_of_files(files))


def protected_files(path: Path, folder_names: Sequence[str], passwords: Sequence[str]) -> list[TextFile]:
    """The files of a zip or an unpacked folder; of several folders inside, the files of one of `folder_names`."""
    if path.is_dir():
        folders = [path / name for name in folder_names if (path / name).is_dir()]
        return files_of(folders[0] if folders and not any(path.glob("*.jsonl")) else path)
    todo = "Give the folder it unpacks to."
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".jsonl")]
            wanted = [name for name in names if set(name.split("/")[:-1]) & set(folder_names)]
            if len({name.rpartition("/")[0] for name in names}) == 1:
                wanted = names  # an archive of a single folder may have another name
            contents = {name: _unlocked(archive, name, passwords) for name in wanted}
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise BraidError(f"this archive cannot be read ({error})", str(path), todo) from None
    if not wanted:
        raise BraidError(f"there are no .jsonl files of {' or '.join(folder_names)} in this archive", str(path))
    if None in contents.values():
        known = ", ".join(f"'{password}'" for password in passwords)
        raise BraidError(f"none of the known passwords ({known}) opens this archive", str(path), todo)
    files = [TextFile(Path(name).name, f"{path}/{name}", content or b"") for name, content in contents.items()]
    return sorted(files, key=lambda file: file.name)


def _unlocked(archive: zipfile.ZipFile, name: str, passwords: Sequence[str]) -> bytes | None:
    """The content of a file, if it is not protected or has one of these passwords."""
    for password in (None, *passwords):
        try:
            with archive.open(name, pwd=None if password is None else password.encode()) as file:
                return read_bounded(file, f"{archive.filename}/{name}")
        except (RuntimeError, zipfile.BadZipFile) as error:  # a wrong password is noticed at once or by the checksum
            if isinstance(error, NotImplementedError):
                raise
    return None
