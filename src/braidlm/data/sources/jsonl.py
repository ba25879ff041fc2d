"""JSON Lines: each line is an object, of which one or several fields make a document."""

from collections.abc import Iterator

from braidlm.core.errors import BraidError
from braidlm.core.reading import parse_row
from braidlm.data.sources.files import Decoder, after_newline, file_shards, is_divisible, lines, open_bytes
from braidlm.data.sources.format import (
    FORMATS,
    MAX_ROW_BYTES,
    Piece,
    ReadOptions,
    RowFormat,
    Shard,
    document_of,
    row_too_long,
)

REPAIR = 'Repair or remove the line: each line of JSONL is one object, such as {"text": "..."}.'


@FORMATS.register("jsonl")
class JsonLines(RowFormat):
    """`.jsonl` and `.ndjson`."""

    extensions = (".jsonl", ".ndjson")

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        return file_shards("jsonl", source, shard_bytes, after_newline if is_divisible(source, options) else None)

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        decoder = Decoder(shard, options)
        with open_bytes(shard.source) as file:
            for number, (position, raw) in enumerate(_rows(lines(file, shard, options))):
                try:
                    if len(raw) > MAX_ROW_BYTES:
                        raise row_too_long("")
                    text = decoder.decode(raw, position)
                    if text.strip():
                        yield document_of(parse_row(text, todo=REPAIR), options, shard.source)
                except BraidError as error:
                    # The line number is computed only for an error: a shard does not know how many lines precede it.
                    line = f"{shard.source}, line {_lines_before(shard) + number + 1}"
                    raise BraidError(error.what, line, error.todo) from None


def _rows(parts: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Whole lines from the parts of lines; of one that is too long only the beginning, which shows that it is."""
    for position, part in parts:
        row = part
        while not row.endswith(b"\n") and len(row) <= MAX_ROW_BYTES and (following := next(parts, None)):
            row += following[1]
        yield position, row


def _lines_before(shard: Shard) -> int:
    count, left = 0, shard.start
    with open_bytes(shard.source) as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count
