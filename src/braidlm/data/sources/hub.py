"""Data sets on the Hugging Face Hub, streamed: `hub:NAME`, `hub:NAME:SPLIT`, `hub:NAME@REVISION`.

NAME may also be a local folder in the Hub's layout.
"""

from collections.abc import Iterator
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.data.sources.fields import check_columns, text_of
from braidlm.data.sources.format import FORMATS, Format, Reading, Shard, missing

PREFIX = "hub:"
GUESSED_BYTES = 32 << 20
"""How large a file of a data set is taken to be, for progress: the Hub does not say before it is read."""


@FORMATS.register("hub")
class Hub(Format):
    """A piece is one of the data set's files."""

    def plan(self, place: str, reading: Reading, shard_bytes: int) -> list[Shard]:
        data = _open(place, reading)
        if data.column_names:
            check_columns(data.column_names, reading, PREFIX + place)
        return [Shard("hub", place, index, index + 1, GUESSED_BYTES) for index in range(data.num_shards)]

    def documents(self, shard: Shard, reading: Reading) -> Iterator[str]:
        data = _open(shard.place, reading)
        rows = data.shard(num_shards=data.num_shards, index=shard.start) if data.num_shards > 1 else data
        for number, row in enumerate(rows):
            yield text_of(row, reading, f"{PREFIX}{shard.place}, file {shard.start + 1}, row {number + 1}")

    def facts(self, place: str, reading: Reading) -> dict[str, Any]:
        return {"hub": place}


def _open(place: str, reading: Reading) -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        raise missing("datasets", "reading a Hub data set") from None
    name, split, revision = _parse(place, reading)
    try:
        return load_dataset(name, reading.subset, split=split, revision=revision, streaming=True)
    except ConnectionError as error:
        raise BraidError(
            f"the Hub cannot be reached ({type(error).__name__})",
            PREFIX + place,
            "Check the connection, or download the data set's files and give their folder.",
        ) from None
    except (ValueError, OSError) as error:  # its errors name the splits and configurations that exist
        raise BraidError(
            f"this data set cannot be opened: {str(error).strip().splitlines()[0]}",
            PREFIX + place,
            "Check the name, `--split` and `--subset`.",
        ) from None


def _parse(place: str, reading: Reading) -> tuple[str, str, str | None]:
    name, _, split = place.partition(":")
    name, _, revision = name.partition("@")
    return name, split or reading.split, revision or None
