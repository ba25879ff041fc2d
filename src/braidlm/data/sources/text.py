"""Plain text files: documents separated by blank lines or by a marker, one per line, or one per file."""

from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from braidlm.data.sources.files import (
    BLOCK,
    NextStart,
    after_newline,
    decode,
    file_shards,
    is_divisible,
    lines,
    open_bytes,
)
from braidlm.data.sources.format import FORMATS, Format, ReadOptions, Shard


@FORMATS.register("text")
class Text(Format):
    """`.txt` and its kin (BabyLM calls its text files `.train`, `.dev` and `.test`)."""

    extensions = (".txt", ".text", ".md", ".train", ".dev", ".test")

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        return file_shards("text", source, shard_bytes, _next_start(options) if is_divisible(source, options) else None)

    def documents(self, shard: Shard, options: ReadOptions) -> Iterator[str]:
        with open_bytes(shard.source) as file:
            for position, raw in self._raw_documents(file, shard, options):
                text = decode(raw, position, shard, options)
                yield text if options.separator == "file" else text.replace("\r\n", "\n").strip("\n")

    def _raw_documents(self, file: BinaryIO, shard: Shard, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
        if options.separator == "blank":
            yield from _paragraphs(lines(file, shard, options))
        elif options.separator == "lines":
            yield from lines(file, shard, options)
        elif options.separator == "file":
            yield 0, b"".join(line for _, line in lines(file, shard, options))
        else:
            divisible = is_divisible(shard.source, options)
            marker = options.separator.encode(options.encoding if divisible else "utf-8")
            yield from _between_markers(lines(file, shard, options), marker)


def _next_start(options: ReadOptions) -> NextStart | None:
    if options.separator in ("lines", "blank", "file"):
        return {"lines": after_newline, "blank": _after_blank_line}.get(options.separator)
    marker = options.separator.encode(options.encoding)
    if any(marker.startswith(marker[cut:]) for cut in range(1, len(marker))):
        return None  # where "===" lies in "=====" depends on what precedes it
    return partial(_after_marker, marker=marker)


def _paragraphs(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    start = 0
    paragraph: list[bytes] = []
    for position, line in lines:
        if line.strip():
            start = start if paragraph else position
            paragraph.append(line)
        elif paragraph:
            yield start, b"".join(paragraph)
            paragraph = []
    if paragraph:
        yield start, b"".join(paragraph)


def _between_markers(lines: Iterator[tuple[int, bytes]], marker: bytes) -> Iterator[tuple[int, bytes]]:
    """The texts between markers. Lines are collected into blocks, and a marker may span lines and blocks."""
    start, buffer, searched, block, size = None, b"", 0, [], 0
    for position, line in lines:
        start = position if start is None else start
        block.append(line)
        size += len(line)
        if size < BLOCK:
            continue
        buffer, block, size = buffer + b"".join(block), [], 0
        while (cut := buffer.find(marker, searched)) >= 0:
            yield start, buffer[:cut]
            start, buffer, searched = start + cut + len(marker), buffer[cut + len(marker) :], 0
        searched = max(0, len(buffer) - len(marker) + 1)
    start = start or 0
    *texts, last = (buffer + b"".join(block)).split(marker)
    for text in [*texts, last] if last else texts:  # a marker at the very end separates nothing
        yield start, text
        start += len(text) + len(marker)


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
        index = (tail + block).find(marker)
        if index >= 0:
            return position - len(tail) + index + len(marker)
        position += len(block)
        tail = (tail + block)[-len(marker) + 1 :] if len(marker) > 1 else b""
    return size
