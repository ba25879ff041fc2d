"""Parquet files, row group by row group."""

from collections.abc import Iterator
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.sources.fields import check_columns, text_of
from braidlm.data.sources.format import FORMATS, Format, ReadOptions, Shard, missing_package

BATCH_ROWS = 512
"""Rows in memory at a time."""


@FORMATS.register("parquet")
class Parquet(Format):
    """`.parquet`; a shard is a run of row groups."""

    extensions = (".parquet",)

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

    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        with _open(shard.source) as file:
            columns = check_columns(file.schema_arrow.names, options, shard.source)
            groups = list(range(shard.start, shard.stop))
            row = sum(file.metadata.row_group(group).num_rows for group in range(shard.start))
            for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=groups, columns=columns):
                for values in batch.to_pylist():
                    row += 1
                    yield text_of(values, options, f"{shard.source}, row {row}")


def _open(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_package("pyarrow", "reading parquet files") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise BraidError("this file does not exist", path) from None
    except pyarrow.ArrowInvalid as error:
        raise BraidError(f"this is not a parquet file, or a damaged one ({error})", path) from None


def _size(group: Any, columns: list[str]) -> int:
    """Uncompressed bytes of the columns that are read."""
    parts = [group.column(index) for index in range(group.num_columns)]
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)
