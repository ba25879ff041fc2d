"""Rows of questions: options, labels, and files that hold lists instead of lines."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.evals.files.json_rows import Row, Rows, TextFile, files_of, rows_of, sha256_of_files, text_of


def question_rows(place: Path, example: str) -> Rows:
    """The rows of all JSONL files of a folder, or of one file, which may also be JSON with lists of objects."""
    if place.suffix != ".json":
        return rows_of(files_of(place, example=example), place, example)
    files = files_of(place, ".json")
    rows = [row for file in files for row in _of_lists(file, example)]
    if not rows:
        raise BraidError("the file has no lists of objects", str(place))
    return Rows(rows, sha256_of_files(files))


def inner(row: Row, key: str) -> Row:
    """An object inside a row."""
    found = value(row, key)
    if not isinstance(found, dict):
        raise row.wrong(f"'{key}' is to be an object, not {_short(found)}")
    return replace(row, facts=found)


def label(row: Row, key: str, labels: Sequence[str | int]) -> int:
    """Which of the labels stands under a key; numbers may be written as text."""
    found = value(row, key)
    told = [str(one) for one in labels]
    said = str(found).strip()
    if isinstance(found, bool) or said not in told:
        raise row.wrong(f"'{key}' is to be one of {', '.join(told)}, not {_short(found)}")
    return told.index(said)


def labelled(row: Row) -> tuple[list[str], int]:
    """Options and answer of a row with `choices: {text, label}` and `answerKey`."""
    choices = inner(row, "choices")
    texts, labels = choices.texts("text"), choices.texts("label")
    if len(texts) != len(labels):
        raise row.wrong(f"there are {len(texts)} options and {len(labels)} labels")
    return texts, label(row, "answerKey", labels)


def numbered(row: Row, options: str = "choices", answer: str = "gold") -> tuple[list[str], int]:
    """Options and answer of a row with a list of options and the number of the right one, counted from 0."""
    choices = row.texts(options)
    return choices, label(row, answer, range(len(choices)))


def value(row: Row, key: str) -> Any:
    """Whatever stands under a key."""
    if key not in row.facts:
        row.text(key)  # raises what every missing key does
    return row.facts[key]


def _of_lists(file: TextFile, example: str) -> Iterator[Row]:
    try:
        found = json.loads(text_of(file))
    except json.JSONDecodeError as error:
        where = f"{file.where}, line {error.lineno}"
        raise BraidError(f"this is not JSON ({error.msg} at character {error.colno})", where) from None
    lists = {name: items for name, items in found.items() if isinstance(items, list)} if isinstance(found, dict) else {}
    if isinstance(found, list):
        lists = {"": found}
    for name, items in lists.items():
        for number, item in enumerate(items, 1):
            row = Row({}, file.stem, f"{file.where}, {f'{name}, ' if name else ''}item {number}", example)
            if not isinstance(item, dict):
                raise row.wrong(f"this is not an object but {_short(item)}")
            yield replace(row, facts=item)


def _short(found: Any) -> str:
    return json.dumps(found, ensure_ascii=False)[:40]
