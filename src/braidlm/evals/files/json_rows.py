"""Rows of JSONL files, each with its file and line number, so that errors can name them."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.reading import parse_row
from braidlm.evals.files.text_files import TextFile, sha256_of_files


@dataclass(frozen=True)
class Row:
    """One object of a file."""

    fields: dict[str, Any]
    stem: str
    """The file's name without its extension."""
    where: str
    """File and line number."""
    example: str
    """An example of a line, for error messages."""

    def text(self, key: str) -> str:
        """A sentence."""
        value = self.value(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"'{key}' is to be a sentence, not {json.dumps(value)[:40]}")
        return value

    def number(self, key: str) -> float:
        """A number, or a text that is one."""
        value = self.value(key)
        try:
            number = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.error(f"'{key}' is to be a number, not {json.dumps(value)[:40]}")
        return number

    def texts(self, key: str) -> list[str]:
        """Two sentences or more."""
        value = self.value(key)
        valid = isinstance(value, list) and all(isinstance(text, str) and text.strip() for text in value)
        if not valid or len(value) < 2:
            raise self.error(f"'{key}' is to be a list of two sentences or more, not {json.dumps(value)[:40]}")
        return value

    def inner(self, key: str) -> "Row":
        """An object inside the row."""
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.error(f"'{key}' is to be an object, not {short(value)}")
        return replace(self, fields=value)

    def label(self, key: str, labels: Sequence[str | int]) -> int:
        """The index of a field's value among the labels; numbers may be written as text."""
        value = self.value(key)
        names = [str(label) for label in labels]
        name = str(value).strip()
        if isinstance(value, bool) or name not in names:
            raise self.error(f"'{key}' is to be one of {', '.join(names)}, not {short(value)}")
        return names.index(name)

    def value(self, key: str) -> Any:
        """The value of a field, of any type."""
        if key not in self.fields:
            raise self.error(f"there is no '{key}'.{did_you_mean(key, self.fields).replace('There are', 'It has')}")
        return self.fields[key]

    def error(self, what: str) -> BraidError:
        """An error about this row."""
        return BraidError(what, self.where, f"A line is {self.example}.")


@dataclass(frozen=True)
class Rows:
    """All rows of some files, in the order of the files' names."""

    rows: list[Row]
    sha256: str
    """Of names and contents."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def rows_of(files: Sequence[TextFile], path: Path | str, example: str) -> Rows:
    """Parse every line as an object."""
    rows = [
        Row(fields, file.stem, where, example)
        for file in files
        for fields, where in json_lines(file, f"A line is {example}.")
    ]
    if not rows:
        raise BraidError("the files are empty", str(path))
    return Rows(rows, sha256_of_files(files))


def short(value: Any) -> str:
    """The beginning of a value, for error messages."""
    return json.dumps(value, ensure_ascii=False)[:40]


def json_lines(file: TextFile, todo: str | None = None) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of a JSONL file, each with its file and line number; `todo` is for errors."""
    # Only a newline ends a line: other line separators of Unicode may occur within a sentence.
    for number, line in enumerate(file.text.replace("\r\n", "\n").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file.where}, line {number}"
        yield parse_row(line, where, todo), where
