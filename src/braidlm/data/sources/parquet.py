"""Parquet files, row group by row group."""

from collections.abc import Iterator
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.sources.fields import check_columns, text_of
from braidlm.data.sources.format import FORMATS, Format, Reading, Shard, missing

ROWS = 512
"""Rows held at a time."""


@FORMATS.register("parquet")
class Parquet(Format):
    """`.parquet`; a piece is a run of row groups."""

    extensions = (".parquet",)

    def plan(self, place: str, reading: Reading, shard_bytes: int) -> list[Shard]:
        with _open(place) as file:
            columns = check_columns(file.schema_arrow.names, reading, place)
            sizes = [_size(file.metadata.row_group(group), columns) for group in range(file.num_row_groups)]
        shards, start, held = [], 0, 0
        for group, size in enumerate(sizes):
            held += size
            if held >= shard_bytes or group == len(sizes) - 1:
                shards.append(Shard("parquet", place, start, group + 1, held))
                start, held = group + 1, 0
        return shards

    def documents(self, shard: Shard, reading: Reading) -> Iterator[str]:
        with _open(shard.place) as file:
            columns = check_columns(file.schema_arrow.names, reading, shard.place)
            groups = list(range(shard.start, shard.stop))
            row = sum(file.metadata.row_group(group).num_rows for group in range(shard.start))
            for batch in file.iter_batches(batch_size=ROWS, row_groups=groups, columns=columns):
                for values in batch.to_pylist():
                    row += 1
                    yield text_of(values, reading, f"{shard.place}, row {row}")


def _open(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing("pyarrow", "reading parquet files") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise BraidError("this file does not exist", path) from None
    except pyarrow.ArrowInvalid as error:
        raise BraidError(f"this is not a parquet file, or a damaged one ({error})", path) from None


def _size(group: Any, columns: list[str]) -> int:
    """Bytes of the columns that are read, unpacked."""
    parts = [group.column(index) for index in range(group.num_columns)]
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)
