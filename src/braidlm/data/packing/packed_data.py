"""Packed token files: what `braid prepare` writes and the loader reads by memory map.

A packed data set is a folder:

    data.json        counts, the token type, the tokenizer's fingerprint and where the text came from
    tokens.bin       every document's tokens in order, each document ended by the tokenizer's EOS
    words.bin        uint8 per token: how many words begin in it, so that any slice has an exact word count
    documents.bin    int64 [documents + 1]: where each document's tokens begin
    lengths.bin      uint32 [documents, 2]: words and UTF-8 bytes of each document's text
    tokenizer/       the tokenizer that made the tokens
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.reading import read_json

FORMAT = 1
MANIFEST = "data.json"


@dataclass
class Manifest:
    """The contents of data.json."""

    name: str
    tokens: int
    documents: int
    words: int
    bytes: int
    dtype: str
    """uint16 when the vocabulary allows, else uint32."""
    vocab_size: int
    eos_id: int | None
    tokenizer: str
    """Fingerprint of the tokenizer."""
    source: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class PackedData:
    """A packed data set on disk, read by memory map."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        expected = self.manifest.tokens * np.dtype(self.manifest.dtype).itemsize
        size = (self.folder / "tokens.bin").stat().st_size
        if size != expected:
            raise BraidError(
                f"tokens.bin has {size} bytes where data.json promises {expected}",
                str(self.folder),
                "The folder is damaged: run `braid prepare` again.",
            )

    @cached_property
    def tokens(self) -> np.ndarray:
        return self._map("tokens.bin", np.dtype(self.manifest.dtype))

    @cached_property
    def word_starts(self) -> np.ndarray:
        return self._map("words.bin", np.dtype(np.uint8))

    @cached_property
    def document_starts(self) -> np.ndarray:
        """[documents + 1] token positions."""
        return self._map("documents.bin", np.dtype(np.int64))

    @cached_property
    def document_words(self) -> np.ndarray:
        return self._map("lengths.bin", np.dtype(np.uint32)).reshape(-1, 2)[:, 0]

    @cached_property
    def document_bytes(self) -> np.ndarray:
        return self._map("lengths.bin", np.dtype(np.uint32)).reshape(-1, 2)[:, 1]

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        path = self.folder / name
        if path.stat().st_size == 0:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")


def is_packed(folder: Path | str) -> bool:
    """Whether a folder is a finished packed data set."""
    return (Path(folder) / MANIFEST).is_file()


def _read_manifest(folder: Path) -> Manifest:
    if not is_packed(folder):
        raise BraidError(
            "this is not a packed data set (no data.json)",
            str(folder),
            "Make one with `braid prepare SOURCE --out DIR`.",
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise BraidError(
            f"this data set has format {manifest.get('format')}; this version of Braid reads format {FORMAT}",
            str(folder),
            "Run `braid prepare` again.",
        )
    return Manifest(**manifest)
