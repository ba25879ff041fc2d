"""The files of a data set in memory, plain or compressed with gzip, with a hash over all of them."""

import gzip
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from braidlm.core.errors import BraidError


@dataclass(frozen=True)
class TextFile:
    """A file of a data set, from a folder or an archive."""

    name: str
    """Without folders, with its extension."""
    where: str
    """For error messages."""
    content: bytes

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    @property
    def text(self) -> str:
        """The content, decoded."""
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BraidError(f"this is not UTF-8 text ({error.reason} at byte {error.start})", self.where) from None


def files_of(path: Path | str, extension: str = ".jsonl", example: str = "") -> list[TextFile]:
    """The files of a folder with this extension, or one file."""
    path = Path(path)
    paths = [path] if path.is_file() else sorted(path.glob(f"*{extension}"))
    if not paths:
        todo = f"A line of such a file is {example}." if example else None
        raise BraidError(f"there are no {extension} files here", str(path), todo)
    return [TextFile(path.name, str(path), path.read_bytes()) for path in paths]


def unpacked_files(path: Path, pattern: str = "*.jsonl") -> list[TextFile]:
    """A file, or the files anywhere below a folder that match a pattern, decompressed if they end with `.gz`."""
    paths = [path] if path.is_file() else sorted({*path.rglob(pattern), *path.rglob(f"{pattern}.gz")})
    if not paths:
        raise BraidError(f"there are no files {pattern} or {pattern}.gz here", str(path))
    files = []
    for file in paths:
        content = file.read_bytes()
        if file.suffix == ".gz":
            try:
                content = gzip.decompress(content)
            except (EOFError, gzip.BadGzipFile, zlib.error):
                raise BraidError("this file is damaged: it cannot be unpacked", str(file)) from None
        files.append(TextFile(file.name.removesuffix(".gz"), str(file), content))
    return files


def sha256_of_files(files: Sequence[TextFile]) -> str:
    """One hash over names and contents."""
    lines = [f"{file.name} {hashlib.sha256(file.content).hexdigest()}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
