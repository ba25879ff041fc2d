"""Reading files, compressed or not: bytes, lines and text, with errors that say where."""

import codecs
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from braidlm.core.addresses import explained_address_errors, file_facts, is_address, open_address
from braidlm.core.errors import BraidError
from braidlm.core.reading import open_plain, system_error
from braidlm.data.sources.format import MAX_BLANK, ReadOptions, Shard, missing_package, too_much_blank

NextStart = Callable[[BinaryIO, int, int], int]
"""`next_start(file, at, size)` is the position of the first document that starts at or after `at`."""
BLOCK = 1 << 20
"""The most bytes of a line that are read at once."""
ONE_BYTE_NEWLINES = ("utf-8", "utf8", "ascii", "latin", "iso-8859", "iso8859", "cp125", "windows-125", "koi8")
"""Encodings in which a newline byte is always a newline, so that a file can be divided without being decoded."""
BUFFER = 1 << 18
ZSTD_INPUT = 1 << 12
"""Compressed bytes unpacked at a time: the library returns all that they hold, at worst 30,000 times as many."""
DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
"""What reading a damaged compressed file raises."""


class _ZstdReader(io.RawIOBase):
    """Zstandard frames one after another; the package's own reader ends silently where a file is cut off."""

    def __init__(self, raw: BinaryIO):
        try:
            import zstandard
        except ImportError:
            raise missing_package("zstandard", "reading .zst files") from None
        self.raw, self.library = raw, zstandard
        self.frame: Any = None
        self.pending, self.ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self.ready:
            data = self.pending or self.raw.read(ZSTD_INPUT)
            self.pending = b""
            if not data:
                if self.frame is not None:
                    raise EOFError("the last frame is incomplete")
                return 0
            self.frame = self.frame or self.library.ZstdDecompressor().decompressobj()
            try:
                self.ready = memoryview(self.frame.decompress(data))
            except self.library.ZstdError as error:
                raise EOFError(str(error)) from None
            if self.frame.eof:
                self.pending, self.frame = self.frame.unused_data, None
        taken, self.ready = self.ready[: len(buffer)], self.ready[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


_READERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".zst": _ZstdReader,
}
COMPRESSIONS = tuple(_READERS)


def is_compressed(path: Path | str) -> bool:
    return Path(path).suffix.lower() in COMPRESSIONS


def extension(path: Path | str) -> str:
    """The extension that shows the format: `.jsonl` for a.jsonl.gz."""
    path = Path(path)
    return Path(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()


@contextlib.contextmanager
def open_bytes(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, or of one at an address, unpacked; a damaged file is an error, never a shorter text."""
    with open_raw(path) as raw:
        try:
            # The buffer finds lines in C, which the readers do in Python.
            reader = _READERS.get(Path(path).suffix.lower())
            yield raw if reader is None else cast(BinaryIO, io.BufferedReader(reader(raw), BUFFER))
        except DAMAGED as error:
            what = f"this compressed file is damaged or cut off ({error})"
            raise BraidError(what, path, "Download or make it again.") from None
        except OSError as error:
            if is_address(path):
                raise
            raise system_error(error, path) from error


@contextlib.contextmanager
def open_raw(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, or of one at an address, as they are."""
    if is_address(path):
        with explained_address_errors(path), open_address(path) as raw:
            yield raw
        return
    with open_plain(path) as raw:
        yield raw


def is_divisible(path: str, options: ReadOptions) -> bool:
    """Whether a file can be read from the middle, so that it can have several shards."""
    return not is_compressed(path) and _newlines_are_bytes(options)


def file_shards(kind: str, path: str, shard_bytes: int, next_start: NextStart | None) -> list[Shard]:
    """Shards of about `shard_bytes`, or without `next_start` a single one; none if the file is empty."""
    size = file_facts(path)[0] if is_address(path) else Path(path).stat().st_size
    if next_start is None:
        return [Shard(kind, path, size=size)] if size else []
    shards, start = [], 0
    with open_bytes(path) as file:
        while start < size:
            nominal = start + shard_bytes
            stop = next_start(file, nominal, size) if nominal < size else size
            shards.append(Shard(kind, path, start, stop, stop - start))
            start = stop
    return shards


def after_newline(file: BinaryIO, at: int, size: int) -> int:
    """The position of the first line that starts at or after `at`."""
    file.seek(at - 1)
    while (part := file.readline(BLOCK)) and not part.endswith(b"\n"):
        pass
    return min(file.tell(), size)


def lines(file: BinaryIO, shard: Shard, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    """The lines of a shard with their byte offsets, those longer than a block in parts of which only the last ends with
    a newline. The first part is blank only if the line is. Encodings with other newlines are converted to UTF-8."""
    position = shard.start
    if position:
        file.seek(position)
    by_bytes = _newlines_are_bytes(options)
    parts = iter(partial(file.readline, BLOCK), b"") if by_bytes else _decoded_lines(file, shard, options)
    for part in _decided(parts, shard):
        if 0 <= shard.stop < position + len(part):
            if shard.stop > position:  # documents separated by a marker may end within a line
                yield position, part[: shard.stop - position]
            return
        yield position, part
        position += len(part)


def _decided(parts: Iterator[bytes], shard: Shard) -> Iterator[bytes]:
    """Parts of lines; while a long line is blank so far, they are joined."""
    begins_line = True
    for part in parts:
        ends_line = part.endswith(b"\n")
        while begins_line and not ends_line and part.isspace() and (following := next(parts, None)):
            part, ends_line = part + following, following.endswith(b"\n")
            if len(part) > MAX_BLANK:
                raise too_much_blank(shard.source)
        begins_line = ends_line
        yield part


class Decoder:
    """The bytes of one document after another as text; errors name the byte that is not text, and what to do."""

    def __init__(self, shard: Shard, options: ReadOptions):
        self.shard, self.options = shard, options
        # `lines` has converted lines of other encodings.
        self.encoding = options.encoding if _newlines_are_bytes(options) else "utf-8"
        self._open: codecs.IncrementalDecoder | None = None

    def decode(self, raw: bytes, position: int, ends: bool = True) -> str:
        """The text of bytes at a position; unless they end the document, they may end within a character."""
        held = b"" if self._open is None else self._open.getstate()[0]
        try:
            if self._open is None and ends:
                text = raw.decode(self.encoding, self.options.errors)
            else:
                self._open = self._open or codecs.getincrementaldecoder(self.encoding)(self.options.errors)
                text = self._open.decode(raw, ends)
        except UnicodeDecodeError as error:
            at, byte = position - len(held) + error.start, error.object[error.start]
            unpacked = " (counted in the unpacked file)" if is_compressed(self.shard.source) else ""
            what = f"byte {at} ({byte:#04x}) is not {self.options.encoding.upper()} text{unpacked}"
            todo = "If the file has another encoding, name it: `--encoding latin-1` for `braid prepare`, `encoding: "
            todo += "latin-1` for a set in a recipe. `--errors replace`, or `errors: replace`, puts � in place of what "
            raise BraidError(what, self.shard.source, todo + "cannot be read.") from None
        if ends:
            self._open = None
        return text.removeprefix("\ufeff") if position == 0 else text


def _newlines_are_bytes(options: ReadOptions) -> bool:
    return options.encoding.lower().replace("_", "-").startswith(ONE_BYTE_NEWLINES)


def _decoded_lines(file: BinaryIO, shard: Shard, options: ReadOptions) -> Iterator[bytes]:
    try:
        text = io.TextIOWrapper(file, encoding=options.encoding, errors=options.errors, newline="")
        while part := text.readline(BLOCK):
            yield part.encode("utf-8")
    except UnicodeError as error:
        todo = "Name the file's encoding with `--encoding`; `--errors replace` puts � in place of what cannot be read."
        raise BraidError(f"this is not {options.encoding.upper()} text ({error})", shard.source, todo) from None
