"""From finished shards to one packed data set: concatenated, then renamed to its name in one step."""

import contextlib
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
from braidlm.data.packing.packed_data import MANIFEST, Manifest, TargetCounts, token_dtype
from braidlm.data.packing.shards import COLUMNS, TARGETS, ShardCounts
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
        """How many documents of these rows (see `COLUMNS`) fit behind those already kept."""
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
    has_prompts: bool = False,
) -> None:
    """Write the packed data set inside the work folder, then rename it to `out`, replacing what was there."""
    final = folder / "final"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    dtype = token_dtype(tokenizer.vocab_size)
    totals, targets = _join(folder / "shards", final, shards, limit, dtype, has_prompts)
    if not totals.documents:
        raise BraidError("the limit leaves no document", todo="The first document is longer than the limit: raise it.")
    tokenizer.save(final / "tokenizer")
    manifest = Manifest(
        name=name,
        tokens=totals.tokens,
        documents=totals.documents,
        words=totals.words,
        bytes=totals.bytes,
        dtype="uint16" if dtype == np.uint16 else "uint32",
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer=tokenizer.fingerprint,
        source=source | {"empty_documents": sum(shard.empty for shard in shards), "braidlm": __version__},
        targets=targets if has_prompts else None,
    )
    write_json(final / MANIFEST, asdict(manifest))
    if out.exists():
        os.rename(out, folder / "replaced")
    os.rename(final, out)


def _join(
    shards_folder: Path, final: Path, shards: Sequence[ShardCounts], limit: Limit, dtype: np.dtype, has_prompts: bool
) -> tuple[ShardCounts, TargetCounts]:
    """Concatenate the shards' files up to the limit; the counts of what was joined."""
    totals, targets = ShardCounts(), TargetCounts(0, 0)
    # The files that have an entry per token, with its bytes.
    per_token = {"tokens": dtype.itemsize, "words": 1} | ({TARGETS: 1} if has_prompts else {})
    names = (*per_token, "documents", "lengths", *(["target_bytes"] if has_prompts else []))
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(final / f"{name}.bin", "wb")) for name in names}
        np.zeros(1, dtype=np.int64).tofile(files["documents"])
        for index in range(len(shards)):
            whole, shard_tokens = True, 0
            for rows in _document_rows(shards_folder / f"{index:06d}.documents"):
                kept = limit.take(rows, totals.documents, totals.words)
                whole = kept == len(rows)
                rows = rows[:kept]
                (totals.tokens + shard_tokens + np.cumsum(rows[:, 0])).tofile(files["documents"])
                rows[:, 1:3].astype(np.uint32).tofile(files["lengths"])
                if has_prompts:
                    rows[:, 3].astype(np.uint32).tofile(files["target_bytes"])
                tokens, words, size, target_size = rows.sum(axis=0).tolist()
                shard_tokens += tokens
                totals.documents += kept
                totals.words += words
                totals.bytes += size
                targets.bytes += target_size
                if not whole:
                    break
            for name, itemsize in per_token.items():
                path = shards_folder / f"{index:06d}.{name}"
                targets.tokens += _copy(path, files[name], shard_tokens * itemsize, name == TARGETS)
            totals.tokens += shard_tokens
            if not whole:
                break
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return totals, targets


def _document_rows(path: Path) -> Iterator[np.ndarray]:
    """The counts of each document of a shard, some at a time: one shard may have a hundred million."""
    with open(path, "rb") as file:
        while len(rows := np.fromfile(file, dtype=np.int64, count=COLUMNS * DOCUMENTS)):
            yield rows.reshape(-1, COLUMNS)


def _copy(path: Path, target: BinaryIO, size: int, counted: bool = False) -> int:
    """Copy the first `size` bytes of a file; if `counted`, the sum of them, else 0."""
    total = 0
    with open(path, "rb") as file:
        while size > 0 and (block := file.read(min(BLOCK, size))):
            target.write(block)
            size -= len(block)
            total += int(np.frombuffer(block, np.uint8).sum(dtype=np.int64)) if counted else 0
    assert size == 0, f"{path} is shorter than its counts say"
    return total
