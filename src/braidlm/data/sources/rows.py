"""Sources whose documents are rows with fields: JSON Lines, tables, parquet and data sets on the Hugging Face Hub."""

import codecs
import csv
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from braidlm.core.errors import BraidError, did_you_mean
from braidlm.core.reading import given_path, parse_row
from braidlm.data.sources import files
from braidlm.data.sources.format import (
    ANSWER,
    FORMATS,
    QUESTION,
    Format,
    Piece,
    ReadOptions,
    Shard,
    consecutive_shards,
    missing_package,
)

MAX_ROW_BYTES = 32_000_000
"""A row with fields is held in memory as a whole; a text file may have documents of any length."""
BATCH_ROWS, BATCH_BYTES = 512, 4_000_000
"""Rows of a parquet file in memory at a time, and about how many bytes they may have."""
BUFFER_BYTES = 1 << 20
"""Bytes of a parquet column that are read at a time, in place of the whole column."""
HUB = "hub:"
ASSUMED_FILE_BYTES = 32 << 20
"""The assumed size of a data set's file, for progress; the Hub does not give it before the file is read."""


@FORMATS.register("jsonl")
class JsonLines(Format):
    """JSON Lines: each line is an object, of which one or several fields make a document."""

    extensions = (".jsonl", ".ndjson")
    has_rows = True

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        return files.file_shards(
            "jsonl", source, shard_bytes, files.after_newline if files.is_divisible(source, options) else None
        )

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        todo = 'Repair or remove the line: each line of JSONL is one object, such as {"text": "..."}.'
        decoder = files.Decoder(shard, options)
        with files.open_bytes(shard.source) as file:
            for number, (position, raw) in enumerate(_whole_lines(files.lines(file, shard, options)), 1):
                try:
                    if len(raw) > MAX_ROW_BYTES:
                        raise row_too_long("")
                    text = decoder.decode(raw, position)
                    if text.strip():
                        yield document_of(parse_row(text, todo=todo), options, shard.source)
                except BraidError as error:
                    # The line number is computed only for an error: a shard does not know how many lines precede it.
                    line = f"{shard.source}, line {_lines_before(shard) + number}"
                    raise BraidError(error.what, line, error.todo) from None


def _whole_lines(parts: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Whole lines from the parts of lines; of one that is too long only the beginning, which shows that it is."""
    for position, part in parts:
        row = part
        while not row.endswith(b"\n") and len(row) <= MAX_ROW_BYTES and (following := next(parts, None)):
            row += following[1]
        yield position, row


def _lines_before(shard: Shard) -> int:
    count, left = 0, shard.start
    with files.open_bytes(shard.source) as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count


@FORMATS.register("csv")
class SeparatedValues(Format):
    """Tables as text: the first line names the columns; separated by commas, or in `.tsv` by tabs."""

    extensions = (".csv", ".tsv")
    has_rows = True
    read_beside_others = False

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        if shards := files.file_shards("csv", source, shard_bytes, None):
            check_columns(next(self._lines(source, options), []), options, source)
        return shards

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        table = self._lines(shard.source, options)
        columns = next(table, [])
        for number, cells in enumerate(table, 1):
            where = f"{shard.source}, row {number}"
            if len(cells) > len(columns):
                todo = "Put a cell with a comma, a quote or a line's end into quotes."
                raise BraidError(f"this row has {len(cells)} cells, and {len(columns)} columns have names", where, todo)
            yield document_of(dict(zip_longest(columns, cells)), options, where)

    def _lines(self, source: str, options: ReadOptions) -> Iterator[list[str]]:
        encoding = codecs.lookup(options.encoding).name
        csv.field_size_limit(MAX_ROW_BYTES)
        with files.open_bytes(source) as file:
            text = io.TextIOWrapper(file, "utf-8-sig" if encoding == "utf-8" else encoding, options.errors, newline="")
            try:
                yield from csv.reader(text, "excel-tab" if files.extension(source) == ".tsv" else "excel")
            except (csv.Error, UnicodeError) as error:
                raise BraidError(f"this is not a table of {options.encoding.upper()} text ({error})", source) from None


@FORMATS.register("parquet")
class Parquet(Format):
    """Parquet files, row group by row group."""

    extensions = (".parquet",)
    start_unit = "row group"
    has_rows = True

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        with _open_parquet(source) as file:
            columns = check_columns(file.schema_arrow.names, options, source)
            sizes = [_size(file.metadata.row_group(group), columns) for group in range(file.num_row_groups)]
        return consecutive_shards("parquet", source, sizes, shard_bytes)

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        with _open_parquet(shard.source) as file:
            columns = check_columns(file.schema_arrow.names, options, shard.source)
            row = sum(file.metadata.row_group(group).num_rows for group in range(shard.start))
            for group in range(shard.start, shard.stop):
                for values in _rows(file, group, columns, shard.source, row):
                    row += 1
                    where = f"{shard.source}, row {row}"
                    document = document_of(values, options, where)
                    if len(document.text) > MAX_ROW_BYTES:
                        raise row_too_long(where)
                    yield document


def _rows(file: Any, group: int, columns: list[str], source: str, before: int) -> Iterator[dict[str, Any]]:
    """The rows of a row group, few at a time if they are long."""
    about = file.metadata.row_group(group)
    mean_bytes = _size(about, columns) // max(1, about.num_rows)
    where = f"{source}, rows {before + 1} to {before + about.num_rows}"
    if mean_bytes > MAX_ROW_BYTES:
        raise row_too_long(where)
    batch_rows = min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, mean_bytes)))
    with _explained_damage(where):
        for batch in file.iter_batches(batch_size=batch_rows, row_groups=[group], columns=columns):
            # Long rows become Python objects one by one, so that a text is not in memory several times over.
            step = batch.num_rows if batch.nbytes <= 2 * BATCH_BYTES else 1
            for start in range(0, batch.num_rows, max(1, step)):
                yield from batch.slice(start, step).to_pylist()


@contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_package("pyarrow", "reading parquet files") from None
    options = {"buffer_size": BUFFER_BYTES, "pre_buffer": False}
    # Opened here, because pyarrow's own words for what cannot be opened are many.
    with files.open_raw(path) as raw, _explained_damage(path), pyarrow.parquet.ParquetFile(raw, **options) as file:
        yield file


@contextmanager
def _explained_damage(where: str) -> Iterator[None]:
    """Let what pyarrow raises for a damaged file be an error that says so."""
    import pyarrow

    try:
        yield
    except (OSError, UnicodeDecodeError, pyarrow.lib.ArrowException) as error:
        what = f"this is not a parquet file, or a damaged one ({_first_line(error)})"
        raise BraidError(what, where, "Download or make it again.") from None


def _size(group: Any, columns: list[str]) -> int:
    """Uncompressed bytes of the columns that are read."""
    parts = [group.column(index) for index in range(group.num_columns)]
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)


@FORMATS.register("hub")
class Hub(Format):
    """Data sets on the Hugging Face Hub, streamed: `hub:NAME`, `hub:NAME:SPLIT`, `hub:NAME@REVISION`.

    NAME may also be a local folder in the Hub's layout. A shard is one of its files.
    """

    start_unit = "file"
    has_rows = True

    @classmethod
    def named(cls, source: str) -> str | None:
        return source.removeprefix(HUB) if source.startswith(HUB) else None

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        data = _open_hub(source, options)
        if data.column_names:
            check_columns(data.column_names, options, HUB + source)
        return [Shard("hub", source, index, index + 1, ASSUMED_FILE_BYTES) for index in range(data.num_shards)]

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        data = _open_hub(shard.source, options)
        rows = data.shard(num_shards=data.num_shards, index=shard.start) if data.num_shards > 1 else data
        for number, row in enumerate(rows, 1):
            yield document_of(row, options, f"{HUB}{shard.source}, file {shard.start + 1}, row {number}")

    def fingerprint(self, source: str, options: ReadOptions) -> dict[str, Any]:
        return {"hub": source}


def _open_hub(source: str, options: ReadOptions) -> Any:
    name, split, revision = hub_parts(source)
    if not name:
        raise BraidError("`hub:` needs the name of a data set", todo="Write hub:ORG/NAME.")
    version = {"split": split or options.split, "revision": revision or None}
    with hub_library(HUB + source, "Check the name, `--split` and `--subset`.") as library:
        return library.load_dataset(hub_name(name), options.subset, **version, streaming=True)


def hub_parts(source: str) -> tuple[str, str, str]:
    """Name, split and revision out of NAME@REVISION:SPLIT; empty where they are not given."""
    name, _, split = source.partition(":")
    name, _, revision = name.partition("@")
    return name, split, revision


def hub_name(name: str) -> str:
    """The name of a data set for `datasets`: a local folder by its expanded path."""
    folder = given_path(name)
    return str(folder) if folder.is_dir() else name


@contextmanager
def hub_library(where: str, todo: str) -> Iterator[Any]:
    """The package `datasets`; its errors become BraidErrors, which name the splits and configurations that exist."""
    try:
        import datasets
    except ImportError:
        raise missing_package("datasets", "reading a Hub data set") from None
    try:
        yield datasets
    except ConnectionError as error:
        todo = "Check the connection, or download the data set's files and give their folder."
        raise BraidError(f"the Hub cannot be reached ({type(error).__name__})", where, todo) from None
    except (ValueError, OSError) as error:
        raise BraidError(f"this data set cannot be opened: {_first_line(error)}", where, todo) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def row_too_long(where: str) -> BraidError:
    """The error for a row that would take too much memory."""
    todo = "Divide it into several, or put its text into a text file (`--separator file`), which may have any length."
    return BraidError(f"this row has more than {MAX_ROW_BYTES // 1_000_000} MB", where, todo)


def document_of(row: Mapping[str, Any], options: ReadOptions, where: str) -> Piece:
    """The chosen fields of a row, joined; with an answer, as the template says. A null counts as nothing.

    A question without an answer, or an answer without a question, is an empty document.
    """
    parts = [_text_of(row, name, options, where) for name in options.fields]
    text = options.joiner.join(part for part in parts if part)
    if options.answer is None:
        return Piece(text, True)
    question, answer = text.strip(), _text_of(row, options.answer, options, where).strip()
    if not question or not answer:
        return Piece("", True)
    prompt = options.template.removesuffix(ANSWER).replace(QUESTION, question)
    return Piece(prompt + answer, True, len(prompt))


def check_columns(columns: list[str], options: ReadOptions, where: str) -> list[str]:
    """The top-level columns that the fields need, or an error that names those that exist."""
    needed = []
    for name in (*options.fields, *filter(None, [options.answer])):
        top = name if name in columns else name.split(".")[0]
        if top not in columns:
            raise _unknown(name, columns, where)
        needed.append(top)
    return list(dict.fromkeys(needed))


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name in row:  # a name with a dot in it comes before a path
        return row[name]
    value: Any = row
    for step in name.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or step not in value:
            raise _unknown(name, value if isinstance(value, Mapping) else (), where, step)
        value = value[step]
    return value


def _unknown(name: str, known: Any, where: str, step: str | None = None) -> BraidError:
    names = [str(item) for item in known]
    listed = f" It has: {', '.join(names)}." if names else ""
    hint = did_you_mean(step or name, names) if names else ""
    todo = (
        "Choose with `--field NAME` (several: `--field A --field B`; inside an object: `--field A.B`), an answer with "
        "`--answer NAME`; in a recipe with `fields: [NAME]` and `answer: NAME` beside the source."
    )
    what = f"there is no field '{name}'.{hint if 'Did you' in hint else ''}{listed}"
    return BraidError(what, where, todo)


def _text_of(row: Mapping[str, Any], name: str, options: ReadOptions, where: str) -> str:
    if (value := _field(row, name, where)) is None:
        return ""
    if isinstance(value, str):
        return value if value.isascii() else _without_surrogates(value, options, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    inside = f" Its fields: {', '.join(map(str, value))}." if isinstance(value, Mapping) else ""
    kind = {dict: "an object", list: "a list", bool: "true or false"}.get(type(value), type(value).__name__)
    what = f"the field '{name}' holds {kind}, not text.{inside}"
    raise BraidError(what, where, "Choose another with `--field NAME`.")


def _without_surrogates(text: str, options: ReadOptions, where: str) -> str:
    """Handle a lone surrogate, which JSON can contain (\\ud83d alone) and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        if options.errors == "strict":
            what = "a text holds half a character (a lone surrogate)"
            raise BraidError(what, where, "`--errors replace` puts � in its place.") from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", options.errors)
    return text
