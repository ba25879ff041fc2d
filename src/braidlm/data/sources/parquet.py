"""Parquet files, row group by row group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.reading import explained_system_errors
from braidlm.data.sources.format import (
    FORMATS,
    MAX_ROW_BYTES,
    Piece,
    ReadOptions,
    RowFormat,
    Shard,
    check_columns,
    document_of,
    missing_package,
    row_too_long,
)

BATCH_ROWS, BATCH_BYTES = 512, 4_000_000
"""Rows in memory at a time, and about how many bytes of them."""
BUFFER_BYTES = 1 << 20
"""What is read of a column at a time, in place of all of it."""


@FORMATS.register("parquet")
class Parquet(RowFormat):
    """`.parquet`; a shard is a run of row groups."""

    extensions = (".parquet",)
    start_unit = "row group"

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        with _open(source) as file:
            columns = check_columns(file.schema_arrow.names, options, source)
            sizes = [_size(file.metadata.row_group(group), columns) for group in range(file.num_row_groups)]
        shards, start, shard_size = [], 0, 0
        for group, size in enumerate(sizes):
            shard_size += size
            if shard_size >= shard_bytes or group == len(sizes) - 1:
                shards.append(Shard("parquet", source, start, group + 1, shard_size))
                start, shard_size = group + 1, 0
        return shards

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        with _open(shard.source) as file:
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
    if mean_bytes > MAX_ROW_BYTES:
        raise row_too_long(f"{source}, rows {before + 1} to {before + about.num_rows}")
    batch_rows = min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, mean_bytes)))
    with _explained_damage(f"{source}, rows {before + 1} to {before + about.num_rows}"):
        for batch in file.iter_batches(batch_size=batch_rows, row_groups=[group], columns=columns):
            # Long rows become Python objects one by one, so that a text is not in memory several times over.
            step = batch.num_rows if batch.nbytes <= 2 * BATCH_BYTES else 1
            for start in range(0, batch.num_rows, max(1, step)):
                yield from batch.slice(start, step).to_pylist()


@contextmanager
def _open(path: str) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_package("pyarrow", "reading parquet files") from None
    with explained_system_errors(path), open(path, "rb"):
        pass  # pyarrow's own words for this are many
    with (
        _explained_damage(path),
        pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file,
    ):
        yield file


@contextmanager
def _explained_damage(where: str) -> Iterator[None]:
    """Let what pyarrow raises for a damaged file be an error that says so."""
    import pyarrow

    try:
        yield
    except BraidError:
        raise
    except (OSError, UnicodeDecodeError, pyarrow.lib.ArrowException) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise BraidError(
            f"this is not a parquet file, or a damaged one ({first_line})", where, "Download or make it again."
        ) from None


def _size(group: Any, columns: list[str]) -> int:
    """Uncompressed bytes of the columns that are read."""
    parts = [group.column(index) for index in range(group.num_columns)]
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)
