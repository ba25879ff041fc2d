"""Rows of JSONL files, each with the place it stands at, so that whatever is wrong with one can be said exactly."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean


@dataclass(frozen=True)
class TextFile:
    """A file of a data set, wherever it was read from."""

    name: str
    """Without folders, with its ending."""
    where: str
    """For messages."""
    content: bytes

    @property
    def stem(self) -> str:
        return Path(self.name).stem


@dataclass(frozen=True)
class Row:
    """One object of a file."""

    facts: dict[str, Any]
    stem: str
    """The file's name without its ending."""
    where: str
    """File and number of the line."""
    example: str
    """What a line looks like."""

    def text(self, key: str) -> str:
        """A sentence."""
        value = self._value(key)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(f"'{key}' is to be a sentence, not {json.dumps(value)[:40]}")
        return value

    def number(self, key: str) -> float:
        """A number, or a text that is one."""
        value = self._value(key)
        try:
            found = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            found = math.nan
        if not math.isfinite(found):
            raise self.wrong(f"'{key}' is to be a number, not {json.dumps(value)[:40]}")
        return found

    def texts(self, key: str) -> list[str]:
        """Two sentences or more."""
        value = self._value(key)
        right = isinstance(value, list) and all(isinstance(text, str) and text.strip() for text in value)
        if not right or len(value) < 2:
            raise self.wrong(f"'{key}' is to be a list of two sentences or more, not {json.dumps(value)[:40]}")
        return value

    def wrong(self, what: str) -> BraidError:
        """An error about this row."""
        return BraidError(what, self.where, f"A line is {self.example}.")

    def _value(self, key: str) -> Any:
        if key not in self.facts:
            raise self.wrong(f"there is no '{key}'.{did_you_mean(key, self.facts).replace('There are', 'It has')}")
        return self.facts[key]


@dataclass(frozen=True)
class Rows:
    """All rows of some files, in the order of the files' names."""

    rows: list[Row]
    sha256: str
    """Of names and contents."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def files_of(place: Path | str, ending: str = ".jsonl", example: str = "") -> list[TextFile]:
    """The files of a folder with this ending, or one file."""
    place = Path(place)
    paths = [place] if place.is_file() else sorted(place.glob(f"*{ending}"))
    if not paths:
        todo = f"A line of such a file is {example}." if example else None
        raise BraidError(f"there are no {ending} files here", str(place), todo)
    return [TextFile(path.name, str(path), path.read_bytes()) for path in paths]


def rows_of(files: Sequence[TextFile], place: Path | str, example: str) -> Rows:
    """Read and check that every line is an object."""
    rows = [row for file in files for row in _rows(file, example)]
    if not rows:
        raise BraidError("the files are empty", str(place))
    return Rows(rows, sha256_of_files(files))


def sha256_of_files(files: Sequence[TextFile]) -> str:
    """One hash over names and contents."""
    lines = [f"{file.name} {hashlib.sha256(file.content).hexdigest()}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def text_of(file: TextFile) -> str:
    """A file's text."""
    try:
        return file.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BraidError(f"this is not UTF-8 text ({error.reason} at byte {error.start})", file.where) from None


def _rows(file: TextFile, example: str) -> Iterator[Row]:
    # Only a newline ends a line: other characters that end lines elsewhere may stand in a sentence.
    for number, line in enumerate(text_of(file).replace("\r\n", "\n").split("\n"), 1):
        if not line.strip():
            continue
        row = Row({}, file.stem, f"{file.where}, line {number}", example)
        try:
            facts = json.loads(line)
        except json.JSONDecodeError as error:
            raise row.wrong(f"this line is not JSON ({error.msg} at character {error.colno})") from None
        if not isinstance(facts, dict):
            raise row.wrong(f"this line is not an object but {json.dumps(facts)[:40]}")
        yield Row(facts, row.stem, row.where, row.example)
