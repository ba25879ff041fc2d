"""Reading files, compressed or not: bytes, lines and text, with errors that say where."""

import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from braidlm.core.errors import BraidError
from braidlm.data.sources.format import ReadOptions, Shard, missing_package

NextStart = Callable[[BinaryIO, int, int], int]
"""`next_start(file, at, size)` is the position of the first document that starts at or after `at`."""
COMPRESSIONS = (".gz", ".zst", ".xz")
BLOCK = 1 << 20
ONE_BYTE_NEWLINES = ("utf-8", "utf8", "ascii", "latin", "iso-8859", "iso8859", "cp125", "windows-125", "koi8")
"""Encodings in which a newline byte is always a newline, so that a file can be divided without being decoded."""


def extension(path: Path | str) -> str:
    """The extension that shows the format: `.jsonl` for a.jsonl.gz."""
    path = Path(path)
    return Path(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()


def is_compressed(path: Path | str) -> bool:
    return Path(path).suffix.lower() in COMPRESSIONS


@contextlib.contextmanager
def open_bytes(path: str) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed; a damaged file is an error, never a shorter text."""
    suffix = Path(path).suffix.lower()
    try:
        with open(path, "rb") as raw:
            yield _DECOMPRESS.get(suffix, lambda plain: plain)(raw)
    except FileNotFoundError:
        raise BraidError("this file does not exist", path) from None
    except PermissionError:
        raise BraidError("no permission to read this file", path) from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, _ZstdError) as error:
        raise BraidError(
            f"this compressed file is damaged or cut off ({error})", path, "Download or make it again."
        ) from None


class _ZstdError(Exception):
    pass


class _ZstdReader(io.RawIOBase):
    """Zstandard frames one after another; the package's own reader ends silently where a file is cut off."""

    def __init__(self, raw: BinaryIO):
        try:
            import zstandard
        except ImportError:
            raise missing_package("zstandard", "reading .zst files") from None
        self.raw, self.library = raw, zstandard
        self.frame = zstandard.ZstdDecompressor().decompressobj()
        self.fresh, self.pending, self.ready = True, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self.ready:
            data = self.pending or self.raw.read(BLOCK)
            self.pending = b""
            if not data:
                if not self.fresh:
                    raise _ZstdError("the last frame is incomplete")
                return 0
            try:
                self.ready = self.frame.decompress(data)
            except self.library.ZstdError as error:
                raise _ZstdError(str(error)) from None
            self.fresh = self.frame.eof
            if self.frame.eof:
                self.pending = self.frame.unused_data
                self.frame = self.library.ZstdDecompressor().decompressobj()
        taken = self.ready[: len(buffer)]
        self.ready = self.ready[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)


_DECOMPRESS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": lambda raw: cast(BinaryIO, gzip.GzipFile(fileobj=raw)),
    ".xz": lambda raw: cast(BinaryIO, lzma.LZMAFile(raw)),  # noqa: SIM115
    ".zst": lambda raw: cast(BinaryIO, io.BufferedReader(_ZstdReader(raw), BLOCK)),
}


def is_divisible(path: str, options: ReadOptions) -> bool:
    """Whether a file can be read from the middle, so that it can have several shards."""
    return not is_compressed(path) and _newlines_are_bytes(options)


def file_shards(kind: str, path: str, shard_bytes: int, next_start: NextStart | None) -> list[Shard]:
    """Shards of about `shard_bytes`, or without `next_start` a single one; none if the file is empty."""
    size = Path(path).stat().st_size
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
    file.readline()
    return min(file.tell(), size)


def lines(file: BinaryIO, shard: Shard, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    """The lines of a shard with their byte offsets; encodings with other newlines are converted to UTF-8."""
    position = shard.start
    if not _newlines_are_bytes(options):
        for line in _decoded_lines(file, shard, options):
            yield position, line
            position += len(line)
        return
    if shard.start:
        file.seek(shard.start)
    for line in file:
        if 0 <= shard.stop < position + len(line):
            if shard.stop > position:  # documents separated by a marker may end within a line
                yield position, line[: shard.stop - position]
            return
        yield position, line
        position += len(line)


def decode(raw: bytes, position: int, shard: Shard, options: ReadOptions) -> str:
    """Bytes as text; an error names the byte that is not text, and what to do."""
    try:
        # `lines` has converted lines of other encodings.
        text = raw.decode(options.encoding if _newlines_are_bytes(options) else "utf-8", options.errors)
    except UnicodeDecodeError as error:
        raise BraidError(
            f"byte {position + error.start} ({raw[error.start]:#04x}) is not {options.encoding.upper()} text"
            f"{' (counted in the unpacked file)' if is_compressed(shard.source) else ''}",
            shard.source,
            "If the file has another encoding name it (`--encoding latin-1`, `--encoding utf-16`); "
            "`--errors replace` puts � in place of what cannot be read.",
        ) from None
    return text.removeprefix("\ufeff") if position == 0 else text


def _newlines_are_bytes(options: ReadOptions) -> bool:
    return options.encoding.lower().replace("_", "-").startswith(ONE_BYTE_NEWLINES)


def _decoded_lines(file: BinaryIO, shard: Shard, options: ReadOptions) -> Iterator[bytes]:
    try:
        for line in io.TextIOWrapper(file, encoding=options.encoding, errors=options.errors, newline=""):
            yield line.encode("utf-8")
    except UnicodeError as error:
        raise BraidError(
            f"this is not {options.encoding.upper()} text ({error})",
            shard.source,
            "Name the file's encoding with `--encoding`; `--errors replace` puts � in place of what cannot be read.",
        ) from None
