"""JSON Lines: an object a line, one or several of its fields a document."""

import json
from collections.abc import Iterator

from braidlm.core.errors import BraidError
from braidlm.data.sources.fields import text_of
from braidlm.data.sources.format import FORMATS, Format, Reading, Shard
from braidlm.data.sources.streams import after_newline, decode, divisible, lines, open_bytes, ranges, whole


@FORMATS.register("jsonl")
class JsonLines(Format):
    """`.jsonl` and `.ndjson`."""

    extensions = (".jsonl", ".ndjson")

    def plan(self, place: str, reading: Reading, shard_bytes: int) -> list[Shard]:
        return (
            ranges("jsonl", place, shard_bytes, after_newline) if divisible(place, reading) else whole("jsonl", place)
        )

    def documents(self, shard: Shard, reading: Reading) -> Iterator[str]:
        with open_bytes(shard.place) as file:
            for number, (position, raw) in enumerate(lines(file, shard, reading)):
                text = decode(raw, position, shard, reading)
                if text.strip():
                    yield self._document(text, number, shard, reading)

    def _document(self, text: str, number: int, shard: Shard, reading: Reading) -> str:
        try:
            row = json.loads(text)
            if isinstance(row, dict):
                # The line number is worked out only for an error: a piece does not know how many lines precede it.
                return text_of(row, reading, shard.place)
            what = f"this line is not an object but {json.dumps(row)[:40]}"
            todo = 'Each line of JSONL is one object, such as {"text": "..."}.'
        except json.JSONDecodeError as error:
            what, todo = f"this line is not JSON ({error.msg} at character {error.colno})", "Repair or remove the line."
        except BraidError as error:
            what, todo = error.what, error.todo or ""
        raise BraidError(what, f"{shard.place}, line {_lines_before(shard) + number + 1}", todo)


def _lines_before(shard: Shard) -> int:
    count, left = 0, shard.start
    with open_bytes(shard.place) as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count
