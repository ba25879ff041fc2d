"""Plain text files: documents parted by blank lines, one a line, one a file, or parted by a marker."""

from collections.abc import Iterator
from typing import BinaryIO

from braidlm.data.sources.format import FORMATS, Format, Reading, Shard
from braidlm.data.sources.streams import BLOCK, after_newline, decode, divisible, lines, open_bytes, ranges, whole


@FORMATS.register("text")
class Text(Format):
    """`.txt` and its kin (BabyLM calls its text files `.train`, `.dev` and `.test`)."""

    extensions = (".txt", ".text", ".md", ".train", ".dev", ".test")

    def plan(self, place: str, reading: Reading, shard_bytes: int) -> list[Shard]:
        if reading.separator == "file" or not divisible(place, reading):
            return whole("text", place)
        if reading.separator == "lines":
            return ranges("text", place, shard_bytes, after_newline)
        if reading.separator == "blank":
            return ranges("text", place, shard_bytes, _after_blank_line)
        marker = reading.separator.encode(reading.encoding)
        if any(marker.startswith(marker[cut:]) for cut in range(1, len(marker))):
            return whole("text", place)  # in "=====" it depends on the beginning where "===" is
        return ranges("text", place, shard_bytes, lambda file, at, size: _after_marker(file, at, size, marker))

    def documents(self, shard: Shard, reading: Reading) -> Iterator[str]:
        with open_bytes(shard.place) as file:
            for position, raw in self._pieces(file, shard, reading):
                text = decode(raw, position, shard, reading)
                yield text if reading.separator == "file" else text.replace("\r\n", "\n").strip("\n")

    def _pieces(self, file: BinaryIO, shard: Shard, reading: Reading) -> Iterator[tuple[int, bytes]]:
        if reading.separator == "blank":
            yield from _paragraphs(lines(file, shard, reading))
        elif reading.separator == "lines":
            yield from lines(file, shard, reading)
        elif reading.separator == "file":
            yield 0, b"".join(line for _, line in lines(file, shard, reading))
        else:
            utf8 = divisible(shard.place, reading)
            marker = reading.separator.encode(reading.encoding if utf8 else "utf-8")
            yield from _between_markers(lines(file, shard, reading), marker)


def _paragraphs(numbered: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    begun = 0
    held: list[bytes] = []
    for position, line in numbered:
        if line.strip():
            begun = begun if held else position
            held.append(line)
        elif held:
            yield begun, b"".join(held)
            held = []
    if held:
        yield begun, b"".join(held)


def _between_markers(numbered: Iterator[tuple[int, bytes]], marker: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines are gathered into blocks, which are searched from a little before their seam: a marker may span lines."""
    begun, held, searched, waiting, size = None, b"", 0, [], 0
    for position, line in numbered:
        begun = position if begun is None else begun
        waiting.append(line)
        size += len(line)
        if size < BLOCK:
            continue
        held, waiting, size = held + b"".join(waiting), [], 0
        while (cut := held.find(marker, searched)) >= 0:
            yield begun, held[:cut]
            begun, held, searched = begun + cut + len(marker), held[cut + len(marker) :], 0
        searched = max(0, len(held) - len(marker) + 1)
    begun = begun or 0
    *pieces, last = (held + b"".join(waiting)).split(marker)
    for piece in [*pieces, last] if last else pieces:  # a marker at the very end parts nothing
        yield begun, piece
        begun += len(piece) + len(marker)


def _after_blank_line(file: BinaryIO, at: int, size: int) -> int:
    after_newline(file, at, size)
    for line in iter(file.readline, b""):
        if not line.strip():
            return file.tell()
    return size


def _after_marker(file: BinaryIO, at: int, size: int, marker: bytes) -> int:
    position, tail = at, b""
    file.seek(at)
    while block := file.read(BLOCK):
        found = (tail + block).find(marker)
        if found >= 0:
            return position - len(tail) + found + len(marker)
        position += len(block)
        tail = (tail + block)[-len(marker) + 1 :] if len(marker) > 1 else b""
    return size
