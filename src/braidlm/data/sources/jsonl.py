"""JSON Lines: each line is an object, of which one or several fields make a document."""

import json
from collections.abc import Iterator

from braidlm.core.errors import BraidError
from braidlm.data.sources.fields import text_of
from braidlm.data.sources.files import after_newline, decode, file_shards, is_divisible, lines, open_bytes
from braidlm.data.sources.format import FORMATS, Format, ReadOptions, Shard


@FORMATS.register("jsonl")
class JsonLines(Format):
    """`.jsonl` and `.ndjson`."""

    extensions = (".jsonl", ".ndjson")

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        return file_shards("jsonl", source, shard_bytes, after_newline if is_divisible(source, options) else None)

    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        with open_bytes(shard.source) as file:
            for number, (position, raw) in enumerate(lines(file, shard, options)):
                text = decode(raw, position, shard, options)
                if text.strip():
                    yield self._document(text, number, shard, options)

    def _document(self, text: str, number: int, shard: Shard, options: ReadOptions) -> str:
        try:
            row = json.loads(text)
            if isinstance(row, dict):
                # The line number is computed only for an error: a shard does not know how many lines precede it.
                return text_of(row, options, shard.source)
            what = f"this line is not an object but {json.dumps(row)[:40]}"
            todo = 'Each line of JSONL is one object, such as {"text": "..."}.'
        except json.JSONDecodeError as error:
            what, todo = f"this line is not JSON ({error.msg} at character {error.colno})", "Repair or remove the line."
        except BraidError as error:
            what, todo = error.what, error.todo or ""
        raise BraidError(what, f"{shard.source}, line {_lines_before(shard) + number + 1}", todo)


def _lines_before(shard: Shard) -> int:
    count, left = 0, shard.start
    with open_bytes(shard.source) as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count, left = count + block.count(b"\n"), left - len(block)
    return count
