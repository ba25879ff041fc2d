"""Compressed files as streams of bytes; a damaged one is an error, never a shorter text."""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from braidlm.data.sources.format import missing_package

BUFFER = 1 << 18
ZSTD_INPUT = 1 << 12
"""Compressed bytes unpacked at a time: the library returns all that they hold, at worst 30,000 times as many."""


class ZstdError(Exception):
    """A Zstandard file is damaged or incomplete."""


DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, ZstdError)
"""What reading a damaged compressed file raises."""


class _ZstdReader(io.RawIOBase):
    """Zstandard frames one after another; the package's own reader ends silently where a file is cut off."""

    def __init__(self, raw: BinaryIO):
        try:
            import zstandard
        except ImportError:
            raise missing_package("zstandard", "reading .zst files") from None
        self.raw, self.library = raw, zstandard
        self.frame = zstandard.ZstdDecompressor().decompressobj()
        self.fresh, self.pending, self.ready = True, b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self.ready:
            data = self.pending or self.raw.read(ZSTD_INPUT)
            self.pending = b""
            if not data:
                if not self.fresh:
                    raise ZstdError("the last frame is incomplete")
                return 0
            try:
                self.ready = memoryview(self.frame.decompress(data))
            except self.library.ZstdError as error:
                raise ZstdError(str(error)) from None
            self.fresh = self.frame.eof
            if self.frame.eof:
                self.pending = self.frame.unused_data
                self.frame = self.library.ZstdDecompressor().decompressobj()
        taken = self.ready[: len(buffer)]
        self.ready = self.ready[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)


_READERS: dict[str, Callable[[BinaryIO], io.RawIOBase]] = {
    ".gz": lambda raw: cast(io.RawIOBase, gzip.GzipFile(fileobj=raw)),
    ".xz": lambda raw: cast(io.RawIOBase, lzma.LZMAFile(raw)),  # noqa: SIM115
    ".zst": _ZstdReader,
}
COMPRESSIONS = tuple(_READERS)


def is_compressed(path: Path | str) -> bool:
    return Path(path).suffix.lower() in COMPRESSIONS


def decompressed(raw: BinaryIO, path: Path | str) -> BinaryIO:
    """An open file's bytes, unpacked if its name says that it is compressed."""
    reader = _READERS.get(Path(path).suffix.lower())
    # The buffer finds lines in C, which the readers do in Python.
    return raw if reader is None else cast(BinaryIO, io.BufferedReader(reader(raw), BUFFER))
