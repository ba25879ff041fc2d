"""Labelled examples, read from the files of a data set and checked line by line."""

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.files import sha256_of
from braidlm.evals.finetuning.data_sets import DataSet, Files

Row = Mapping[str, Any]
LABEL = "label"


@dataclass(frozen=True)
class Examples:
    """One file's examples, in its order."""

    texts: list[tuple[str, str | None]]
    """The text, or two."""
    labels: np.ndarray
    """Classes (int64) or numbers (float64)."""

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class LabelledData:
    """What is learned from and what is judged."""

    of: DataSet
    train: Examples
    valid: Examples
    sha256: str


def read_labelled(of: DataSet, place: Path) -> LabelledData:
    """A data set from its folder, or from the training file that stands beside the other."""
    files = _layout(of, place)
    folder = place.parent if place.is_file() else place
    paths = [folder / files.train, folder / files.valid]
    train, valid = (read_examples(of, path, files) for path in paths)
    if of.labels is not None and len(set(train.labels.tolist())) < 2:
        only = of.labels[int(train.labels[0])]
        raise BraidError(f"every example has the label '{only}': there is nothing to learn", str(paths[0]))
    digest = hashlib.sha256("".join(f"{path.name} {sha256_of(path)}\n" for path in paths).encode())
    return LabelledData(of, train, valid, digest.hexdigest())


def _layout(of: DataSet, place: Path) -> Files:
    """The layout whose files are in a place."""
    folder = place.parent if place.is_file() else place
    begun = [files for files in of.files if (folder / files.train).is_file() or (folder / files.valid).is_file()]
    found = [files for files in begun if (folder / files.train).is_file() and (folder / files.valid).is_file()]
    if place.is_file():
        found = [files for files in found if files.train == place.name] or found
    if found:
        return found[0]
    names = [f"{files.train} and {files.valid}" for files in of.files]
    if not begun:
        raise BraidError(f"there is no data of {of.task} here", str(folder), f"It is {', or '.join(names)}.")
    has, lacks = (begun[0].valid, begun[0].train)
    if not (folder / has).is_file():
        has, lacks = lacks, has
    raise BraidError(
        f"{has} is here, and {lacks} is not: {of.task} needs examples to learn from and examples to judge",
        str(folder),
        f"Put {lacks} beside it, or give another folder with `--data {of.task}=FOLDER`.",
    )


def read_examples(of: DataSet, path: Path, files: Files) -> Examples:
    """The examples of one file."""
    texts, labels = [], []
    for row, where in _rows(path, files):
        row = {of.other_fields.get(name, name): value for name, value in row.items()}
        texts.append(_texts(of, row, where))
        labels.append(_label(of, row, where))
    if not texts:
        raise BraidError("there are no examples in this file", str(path))
    return Examples(texts, np.array(labels, dtype=np.float64 if of.labels is None else np.int64))


def _rows(path: Path, files: Files) -> Iterator[tuple[Row, str]]:
    """The rows of a file with the place of each, for errors."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BraidError(f"this is not UTF-8 text ({error.reason} at byte {error.start})", str(path)) from None
    if path.suffix == ".jsonl":
        yield from _json_rows(text, path)
    else:
        yield from _table_rows(text, path, files.columns)


def _json_rows(text: str, path: Path) -> Iterator[tuple[Row, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BraidError(f"this line is not JSON ({error.msg} at character {error.colno})", where) from None
        if not isinstance(row, dict):
            raise BraidError(f"this line is not an object but {json.dumps(row)[:40]}", where)
        yield row, where


def _table_rows(text: str, path: Path, columns: tuple[str, ...] | None) -> Iterator[tuple[Row, str]]:
    """Rows of a table: tab-separated as GLUE writes it, where quotes mean nothing, or comma-separated."""
    for cells, number in _tab_cells(text) if path.suffix == ".tsv" else _comma_cells(text):
        if not any(cell.strip() for cell in cells):
            continue
        if columns is None or _is_heading(cells, columns):
            columns = tuple(cell.strip() for cell in cells)
            continue
        where = f"{path}, line {number}"
        if len(cells) != len(columns):
            raise BraidError(f"this line has {len(cells)} columns, not {len(columns)}", where)
        yield {name: cell for name, cell in zip(columns, cells, strict=True) if name}, where


def _tab_cells(text: str) -> Iterator[tuple[list[str], int]]:
    for number, line in enumerate(text.split("\n"), 1):
        yield line.rstrip("\r").split("\t"), number


def _comma_cells(text: str) -> Iterator[tuple[list[str], int]]:
    rows = csv.reader(io.StringIO(text, newline=""))
    for cells in rows:
        yield cells, rows.line_num


def _is_heading(cells: list[str], columns: tuple[str, ...]) -> bool:
    """Whether the first line names the columns after all, as in GLUE's own SST-2."""
    return {name for name in columns if name} <= {cell.strip() for cell in cells}


def _texts(of: DataSet, row: Row, where: str) -> tuple[str, str | None]:
    for name in of.text_fields:
        if name not in row:
            raise BraidError(f"there is no '{name}'.{did_you_mean(name, row).replace('There are', 'It has')}", where)
        if not isinstance(row[name], str):
            raise BraidError(f"'{name}' is to be a text, not {json.dumps(row[name])[:40]}", where)
    first = of.first.format_map(row)
    second = None if of.second is None else of.second.format_map(row)
    if not (first + (second or "")).strip():
        raise BraidError("there is no text", where)
    return first, second


def _label(of: DataSet, row: Row, where: str) -> float:
    if LABEL not in row:
        raise BraidError(f"there is no '{LABEL}'.{did_you_mean(LABEL, row).replace('There are', 'It has')}", where)
    given = row[LABEL]
    if of.labels is None:
        return _number(of, given, where)
    if isinstance(given, str) and given.strip() in of.labels:
        return of.labels.index(given.strip())
    known = {str(number): number for number in range(len(of.labels))}
    written = str(int(given)) if isinstance(given, bool) else str(given).strip()
    if written not in known:
        listed = ", ".join(f"{number} ({name})" for number, name in enumerate(of.labels))
        raise BraidError(f"the label {json.dumps(given)[:40]} is none of those of {of.name}: {listed}", where)
    return known[written]


def _number(of: DataSet, given: Any, where: str) -> float:
    low, high = of.numbers
    try:
        found = float(given)
    except (TypeError, ValueError):
        found = float("nan")
    if not low <= found <= high:
        raise BraidError(
            f"the label {json.dumps(given)[:40]} is not a number from {low:g} to {high:g}, as those of {of.name} are",
            where,
        )
    return found
