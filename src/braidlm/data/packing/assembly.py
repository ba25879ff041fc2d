"""From finished shards to one packed data set: concatenated, then renamed to its name in one step."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from braidlm import __version__
from braidlm.core.errors import BraidError
from braidlm.core.files import write_json
from braidlm.data.packing.packed_data import MANIFEST, Manifest, token_dtype
from braidlm.data.packing.shards import ShardCounts
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.config.ranges import Count
from braidlm.model.config.strict import decode

BLOCK = 1 << 22
DOCUMENTS = 1 << 18
"""Documents whose counts are in memory at a time."""


@dataclass(frozen=True)
class Limit:
    """The maximum size of a data set, in whole documents from the beginning."""

    documents: Count | None = None
    words: Count | None = None

    def __post_init__(self) -> None:
        decode(Limit, self, "limit")

    def __bool__(self) -> bool:
        return self.documents is not None or self.words is not None

    def reached_by(self, shards: Sequence[ShardCounts]) -> bool:
        """Whether these shards contain as much as the limit allows."""
        documents, words = sum(shard.documents for shard in shards), sum(shard.words for shard in shards)
        return (self.documents is not None and documents >= self.documents) or (
            self.words is not None and words >= self.words
        )

    def take(self, rows: np.ndarray, documents: int, words: int) -> int:
        """How many documents of [tokens, words, bytes] rows fit behind those already kept."""
        fit = len(rows) if self.documents is None else min(len(rows), self.documents - documents)
        if self.words is not None:
            fit = min(fit, int(np.searchsorted(np.cumsum(rows[:, 1]), self.words - words, side="right")))
        return fit


def assemble(
    folder: Path,
    out: Path,
    *,
    name: str,
    tokenizer: BraidTokenizer,
    shards: Sequence[ShardCounts],
    limit: Limit,
    source: dict[str, Any],
) -> None:
    """Write the packed data set inside the work folder, then rename it to `out`, replacing what was there."""
    final = folder / "final"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    dtype = token_dtype(tokenizer.vocab_size)
    totals = _join(folder / "shards", final, shards, limit, dtype)
    if not totals[0]:
        raise BraidError("the limit leaves no document", todo="The first document is longer than the limit: raise it.")
    documents, tokens, words, size = totals
    tokenizer.save(final / "tokenizer")
    manifest = Manifest(
        name=name,
        tokens=tokens,
        documents=documents,
        words=words,
        bytes=size,
        dtype="uint16" if dtype == np.uint16 else "uint32",
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer=tokenizer.fingerprint,
        source=source | {"empty_documents": sum(shard.empty for shard in shards), "braidlm": __version__},
    )
    write_json(final / MANIFEST, asdict(manifest))
    if out.exists():
        os.rename(out, folder / "replaced")
    os.rename(final, out)


def _join(
    shards_folder: Path, final: Path, shards: Sequence[ShardCounts], limit: Limit, dtype: np.dtype
) -> tuple[int, int, int, int]:
    """Concatenate the shards' files up to the limit: (documents, tokens, words, bytes)."""
    documents = tokens = words = size = 0
    with (
        open(final / "tokens.bin", "wb") as tokens_file,
        open(final / "words.bin", "wb") as words_file,
        open(final / "documents.bin", "wb") as documents_file,
        open(final / "lengths.bin", "wb") as lengths_file,
    ):
        np.zeros(1, dtype=np.int64).tofile(documents_file)
        for index in range(len(shards)):
            whole, shard_tokens = True, 0
            for rows in _document_rows(shards_folder / f"{index:06d}.documents"):
                kept = limit.take(rows, documents, words)
                whole = kept == len(rows)
                rows = rows[:kept]
                (tokens + shard_tokens + np.cumsum(rows[:, 0])).tofile(documents_file)
                rows[:, 1:].astype(np.uint32).tofile(lengths_file)
                shard_tokens += int(rows[:, 0].sum())
                documents, words = documents + kept, words + int(rows[:, 1].sum())
                size += int(rows[:, 2].sum())
                if not whole:
                    break
            _copy(shards_folder / f"{index:06d}.tokens", tokens_file, shard_tokens * dtype.itemsize)
            _copy(shards_folder / f"{index:06d}.words", words_file, shard_tokens)
            tokens += shard_tokens
            if not whole:
                break
        for file in (tokens_file, words_file, documents_file, lengths_file):
            file.flush()
            os.fsync(file.fileno())
    return documents, tokens, words, size


def _document_rows(path: Path) -> Iterator[np.ndarray]:
    """[tokens, words, bytes] of each document of a shard, some at a time: one shard may have a hundred million."""
    with open(path, "rb") as file:
        while len(rows := np.fromfile(file, dtype=np.int64, count=3 * DOCUMENTS)):
            yield rows.reshape(-1, 3)


def _copy(path: Path, target: BinaryIO, size: int) -> None:
    with open(path, "rb") as file:
        while size > 0 and (block := file.read(min(BLOCK, size))):
            target.write(block)
            size -= len(block)
    assert size == 0, f"{path} is shorter than its counts say"
