"""Rows of multiple-choice questions: options with the answer, and JSON files that hold lists instead of lines."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.core.reading import parse_json
from braidlm.evals.files.json_rows import Row, Rows, rows_of, short
from braidlm.evals.files.text_files import TextFile, files_of, sha256_of_files


def question_rows(path: Path, example: str) -> Rows:
    """The rows of all JSONL files of a folder, or of one file, which may also be JSON with lists of objects."""
    if path.suffix != ".json":
        return rows_of(files_of(path, example=example), path, example)
    files = files_of(path, ".json")
    rows = [row for file in files for row in _of_lists(file, example)]
    if not rows:
        raise BraidError("the file has no lists of objects", str(path))
    return Rows(rows, sha256_of_files(files))


def labelled_options(row: Row) -> tuple[list[str], int]:
    """Options and answer of a row with `choices: {text, label}` and `answerKey`."""
    choices = row.inner("choices")
    texts, labels = choices.texts("text"), choices.texts("label")
    if len(texts) != len(labels):
        raise row.error(f"there are {len(texts)} options and {len(labels)} labels")
    return texts, row.label("answerKey", labels)


def numbered_options(row: Row, options: str = "choices", answer: str = "gold") -> tuple[list[str], int]:
    """Options and answer of a row with a list of options and the index of the right one, counted from 0."""
    choices = row.texts(options)
    return choices, row.label(answer, range(len(choices)))


def _of_lists(file: TextFile, example: str) -> Iterator[Row]:
    content = parse_json(file.text, file.where, expect=object)
    lists = {"": content} if isinstance(content, list) else content if isinstance(content, dict) else {}
    for name, items in lists.items():
        for number, item in enumerate(items if isinstance(items, list) else (), 1):
            row = Row({}, file.stem, f"{file.where}, {f'{name}, ' if name else ''}item {number}", example)
            if not isinstance(item, dict):
                raise row.error(f"this is not an object but {short(item)}")
            yield replace(row, fields=item)
