"""Plain text files: documents separated by blank lines or by a marker, one per line, or one per file."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from braidlm.data.sources import files
from braidlm.data.sources.files import BLOCK, NextStart
from braidlm.data.sources.format import FORMATS, Format, Piece, ReadOptions, Separator, Shard

DEFAULT = "blank"
"""What separates the documents of a file that no pattern matches."""
RawPiece = tuple[int, bytes, bool]
"""A part of a document as it is in the file: its position, its bytes, and whether the document ends with it."""


@FORMATS.register("text")
class Text(Format):
    """Plain text files: documents separated by blank lines or by a marker, one per line, or one per file."""

    extensions = (".txt", ".text", ".md", ".train", ".dev", ".test")  # the last three are BabyLM's

    def shards(self, source: str, options: ReadOptions, shard_bytes: int) -> list[Shard]:
        start = _next_start(_for_file(source, options)) if files.is_divisible(source, options) else None
        return files.file_shards("text", source, shard_bytes, start)

    def pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        pieces = self._pieces(shard, _for_file(shard.source, options))
        return pieces if options.section_bytes is None else in_sections(pieces, options.section_bytes)

    def _pieces(self, shard: Shard, options: ReadOptions) -> Iterator[Piece]:
        decoder, trimmed = files.Decoder(shard, options), TrimmedLines()
        with files.open_bytes(shard.source) as file:
            for position, raw, ends in _raw_pieces(files.lines(file, shard, options), shard, options):
                text = decoder.decode(raw, position, ends)
                if options.separator == "file":
                    yield Piece(text, ends)
                else:
                    yield from trimmed.pieces(text, ends)


class TrimmedLines:
    """Documents without newlines at their ends, and with `\\n` for `\\r\\n`."""

    def __init__(self) -> None:
        self._begun, self._newlines, self._return = False, 0, ""

    def pieces(self, text: str, ends: bool) -> Iterator[Piece]:
        """The pieces that are certain now: newlines wait until there is text after them."""
        text = self._return + text
        self._return = "\r" if text.endswith("\r") and not ends else ""
        text = text.removesuffix(self._return).replace("\r\n", "\n")
        if bare := text.strip("\n"):
            before = self._newlines + len(text) - len(text.lstrip("\n")) if self._begun else 0
            for length in range(before, BLOCK, -BLOCK):
                yield Piece("\n" * min(BLOCK, length - BLOCK), False)
            bare = "\n" * min(before, BLOCK) + bare
            self._begun, self._newlines = True, len(text) - len(text.rstrip("\n"))
        else:
            self._newlines += len(text)
        if bare or ends:
            yield Piece(bare, ends)
        if ends:
            self._begun, self._newlines = False, 0


def _for_file(source: str, options: ReadOptions) -> ReadOptions:
    return replace(options, separator=separator_of(source, options.separator))


def _raw_pieces(parts: Iterator[tuple[int, bytes]], shard: Shard, options: ReadOptions) -> Iterator[RawPiece]:
    if options.separator == "blank":
        return _paragraphs(parts)
    if options.separator in ("lines", "file"):
        return _as_they_are(parts, options.separator == "lines")
    encoding = options.encoding if files.is_divisible(shard.source, options) else "utf-8"
    return _between_markers(_blocks(parts), str(options.separator).encode(encoding))


def _next_start(options: ReadOptions) -> NextStart | None:
    if options.separator in ("lines", "blank", "file"):
        return {"lines": files.after_newline, "blank": _after_blank_line}.get(str(options.separator))
    marker = str(options.separator).encode(options.encoding)
    if any(marker.startswith(marker[cut:]) for cut in range(1, len(marker))):
        return None  # where "===" lies in "=====" depends on what precedes it
    return partial(_after_marker, marker=marker)


def _paragraphs(parts: Iterator[tuple[int, bytes]]) -> Iterator[RawPiece]:
    start = size = 0
    paragraph: list[bytes] = []
    in_paragraph, begins_line = False, True
    for position, part in parts:
        if begins_line and not part.strip():
            if in_paragraph:
                yield start, b"".join(paragraph), True
            paragraph, size, in_paragraph = [], 0, False
            continue
        begins_line, in_paragraph = part.endswith(b"\n"), True
        start = start if paragraph else position
        paragraph.append(part)
        size += len(part)
        if size >= BLOCK:
            yield start, b"".join(paragraph), False
            start, paragraph, size = position + len(part), [], 0
    if in_paragraph:
        yield start, b"".join(paragraph), True


def _as_they_are(parts: Iterator[tuple[int, bytes]], by_line: bool) -> Iterator[RawPiece]:
    end, ends = 0, by_line
    for position, part in parts if by_line else _blocks(parts):
        end, ends = position + len(part), by_line and part.endswith(b"\n")
        yield position, part, ends
    if not ends:
        yield end, b"", True


def _between_markers(blocks: Iterator[tuple[int, bytes]], marker: bytes) -> Iterator[RawPiece]:
    """The texts between markers, which may span blocks."""
    begin, rest, unfinished = 0, b"", False
    for position, block in blocks:
        begin, block, at = position - len(rest), rest + block, 0
        while (cut := block.find(marker, at)) >= 0:
            yield begin + at, block[at:cut], True
            at, unfinished = cut + len(marker), False
        sure = max(at, len(block) - len(marker) + 1)  # what follows may be the beginning of a marker
        if sure > at:
            yield begin + at, block[at:sure], False
            unfinished = True
        begin, rest = begin + sure, block[sure:]
    if rest or unfinished:  # a marker at the very end separates nothing
        yield begin, rest, True


def _blocks(parts: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    start = size = 0
    block: list[bytes] = []
    for position, part in parts:
        start = start if block else position
        block.append(part)
        size += len(part)
        if size >= BLOCK:
            yield start, b"".join(block)
            block, size = [], 0
    if block:
        yield start, b"".join(block)


def _after_blank_line(file: BinaryIO, at: int, size: int) -> int:
    files.after_newline(file, at, size)
    begins_line = True
    for part in iter(partial(file.readline, BLOCK), b""):
        ends_line = part.endswith(b"\n")
        if begins_line and ends_line and not part.strip():
            return file.tell()
        begins_line = ends_line or (begins_line and not part.strip())
    return size


def _after_marker(file: BinaryIO, at: int, size: int, marker: bytes) -> int:
    position, tail = at, b""
    file.seek(at)
    while block := file.read(BLOCK):
        if (index := (tail + block).find(marker)) >= 0:
            return position - len(tail) + index + len(marker)
        position += len(block)
        tail = (tail + block)[-len(marker) + 1 :] if len(marker) > 1 else b""
    return size


def in_sections(pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
    """The pieces of the text with a document for each section: `size` bytes and the rest of their line.

    Blank lines stay with the text before them, because a document without a word would be dropped.
    """
    section, written, has_words, is_full = "", 0, False, False
    for text, ends, prompt in pieces:
        for line in text.splitlines(keepends=True):
            if is_full and not line.isspace():
                end = section.rfind("\n") + 1  # the beginning of this line may have been in the piece before
                yield Piece(section[:end], True)
                section, has_words, is_full = section[end:], False, False
                written = len(section.encode())
            section += line
            written += len(line.encode())
            has_words = has_words or not line.isspace()
            is_full = is_full or (written >= size and has_words and line.endswith("\n"))
        if ends or (section and not is_full):
            yield Piece(section, ends, prompt)
            section = ""
        if ends:
            written, has_words, is_full = 0, False, False


def separator_of(path: Path | str, separator: Separator) -> str:
    """The rule for one file."""
    if isinstance(separator, str):
        return separator
    return next((rule for pattern, rule in separator.items() if _matches(path, pattern)), DEFAULT)


def parse_separators(items: Sequence[str]) -> Separator:
    """From `S` or several `PATTERN=S`, as options of a command; \\n and \\t stand for what a shell cannot easily pass.

    A pattern has a dot or a star in it, so that `===` is a text and `*.txt====` that text for some files.
    """
    rules: dict[str, str] = {}
    for item in items:
        pattern, equals, rule = item.partition("=")
        named = equals and ("." in pattern or "*" in pattern)
        rules[pattern if named else "*"] = unescaped(rule if named else item)
    # A rule for all files comes last, wherever it was given.
    every = rules.pop("*", None)
    if not rules:
        return DEFAULT if every is None else every
    return rules | ({} if every is None else {"*": every})


def unmatched_patterns(separator: Separator, paths: Sequence[str]) -> list[str]:
    """The patterns that no file has, which are most probably misspelled."""
    patterns = [] if isinstance(separator, str) else [pattern for pattern in separator if pattern != "*"]
    return [pattern for pattern in patterns if not any(_matches(path, pattern) for path in paths)]


def unescaped(text: str) -> str:
    """A text with \\n and \\t replaced."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _matches(path: Path | str, pattern: str) -> bool:
    """Whether the name fits, or the path if the pattern has folders; with or without a last suffix (`.gz`)."""
    path = Path(path)
    return bool(pattern) and (path.match(pattern) or path.with_suffix("").match(pattern))
