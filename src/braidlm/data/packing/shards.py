"""The shards of a packed data set: text is packed shard by shard, and finished ones are joined into the data set."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from braidlm import __version__
from braidlm.core.errors import BraidError, errors_at
from braidlm.core.files import explained_disk_errors, write_json
from braidlm.core.reading import read_json
from braidlm.data.packing.packed_data import MANIFEST, Manifest, TargetCounts, token_dtype
from braidlm.data.sources.format import Piece, by_document, from_first_word
from braidlm.data.tokenizing.encoding import EncodedBatch, Packer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.config.ranges import Count, CountOrZero
from braidlm.model.config.strict import decode

BATCH_CHARS = 1 << 18
"""Text encoded at a time: enough for vectorised counting, little enough for small memory."""
MAX_DOCUMENT_BYTES = (1 << 32) - 1
"""lengths.bin has four bytes for each number."""
TARGETS = "targets"
"""The file of a shard in which only some tokens are targets."""
COLUMNS = 4
"""The numbers of each document in the documents' file: tokens, words, bytes, and the bytes of targets."""
BLOCK = 1 << 22
DOCUMENTS = 1 << 18
"""Documents whose counts are in memory at a time."""


@dataclass
class ShardCounts:
    """What one packed shard contains; its file is written last, so a shard with this file is finished."""

    tokens: CountOrZero = 0
    documents: CountOrZero = 0
    words: CountOrZero = 0
    bytes: CountOrZero = 0
    targets: CountOrZero = 0
    """Tokens that are to be predicted."""
    empty: CountOrZero = 0
    """Documents without a word, which were left out."""
    marked: CountOrZero = 0
    """Documents that contain the end-of-text token as plain text."""
    unsafe_cuts: CountOrZero = 0
    """Places at which a long document was cut for encoding although the tokens there may be others."""
    target_bytes: CountOrZero = 0
    """The bytes that are to be predicted, of a shard at an address."""
    sha256: str = ""
    """The hash of its files, of a shard at an address."""

    def add(self, rows: np.ndarray) -> None:
        """Count documents; see `COLUMNS`."""
        tokens, words, size, _ = rows.sum(axis=0).tolist()
        self.tokens += tokens
        self.documents += len(rows)
        self.words += words
        self.bytes += size


def pack_shard(
    pieces: Iterable[Piece],
    packer: Packer,
    has_prompts: bool,
    folder: Path,
    index: int,
    where: str,
    chunk: int | None = None,
) -> ShardCounts:
    """Write one shard's tokens, words and document counts; `NNNNNN.json` appears last.

    With `chunk`, so many tokens are a document, wherever documents end.
    """
    counts, open_document = ShardCounts(), np.zeros(COLUMNS if chunk is None else (0, COLUMNS), dtype=np.int64)
    dtype = token_dtype(packer.tokenizer.vocab_size)
    names = ("tokens", "words", "documents", *([TARGETS] if has_prompts else []))
    scratch = {name: folder / f"{index:06d}.{name}.{os.getpid()}" for name in names}
    with explained_disk_errors(folder):
        with _synced_files(scratch) as files:
            for parts in _batches(pieces, packer, counts, where):
                batch = _encoded(parts, packer, where)
                if chunk is None:
                    rows, open_document = _documents(batch.texts, open_document)
                else:
                    rows, open_document = _chunks(batch, packer.token_sizes, open_document, chunk)
                if max(open_document[..., 2].sum(), rows[:, 2].max(initial=0)) > MAX_DOCUMENT_BYTES:
                    raise BraidError("a document has more than 4 GiB", where, "Divide it into several documents.")
                tokens = batch.tokens.astype(dtype)
                arrays = {"tokens": tokens, "words": batch.words, "documents": rows, TARGETS: batch.targets}
                for name, file in files.items():
                    file.write(arrays[name].tobytes())
                counts.empty += batch.empty
                counts.targets += int(batch.targets.sum(dtype=np.int64))
                counts.add(rows)
            if open_document.ndim > 1 and len(open_document):  # the last chunk, which is shorter
                rows = open_document.sum(axis=0, keepdims=True)
                files["documents"].write(rows.tobytes())
                counts.add(rows)
        for name, path in scratch.items():
            os.replace(path, folder / f"{index:06d}.{name}")
        write_json(folder / f"{index:06d}.json", asdict(counts))
    return counts


@contextlib.contextmanager
def _synced_files(paths: dict[str, Path]) -> Iterator[dict[str, BinaryIO]]:
    """New files, which are on the disk when the block ends."""
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {name: stack.enter_context(open(path, "wb")) for name, path in paths.items()}
        yield files
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())


def finished_shard(folder: Path, index: int, vocab_size: int, has_prompts: bool = False) -> ShardCounts | None:
    """The counts of a shard that is finished and complete; None if it has to be packed, also because it is damaged."""
    path = folder / f"{index:06d}.json"
    try:
        counts = decode(ShardCounts, read_json(path))
        dtypes: dict[str, Any] = {"tokens": token_dtype(vocab_size), "words": np.uint8, "documents": np.int64}
        tokens, words, rows = (
            np.memmap(path.with_suffix(f".{name}"), dtype, "r") if counts.documents else np.zeros(0, dtype)
            for name, dtype in dtypes.items()
        )
        totals = rows.reshape(-1, COLUMNS).sum(axis=0).tolist()
        targets = counts.targets
        if has_prompts:
            targets = int(np.fromfile(path.with_suffix(f".{TARGETS}"), dtype=np.uint8).sum(dtype=np.int64))
    except (OSError, ValueError):
        return None
    complete = (
        len(tokens) == len(words) == counts.tokens
        and len(rows) == COLUMNS * counts.documents
        and totals[:3] == [counts.tokens, counts.words, counts.bytes]
        and targets == counts.targets
        and rows.min(initial=0) >= 0
        and tokens.max(initial=0) < vocab_size
    )
    return counts if complete else None


class _Part(NamedTuple):
    """A document, or a part of one that is short enough to encode; see `Packer.pack`."""

    text: str
    ends: bool
    within_word: bool
    prompt: int
    number: int
    """Which document of the shard it is of, from 1."""


def _encoded(parts: list[_Part], packer: Packer, where: str) -> EncodedBatch:
    """The encoded parts; an error names the document."""
    texts, ends, within_word, prompts, _ = zip(*parts, strict=True)
    try:
        return packer.pack(texts, ends, within_word, prompts)
    except BraidError:
        for part in parts:
            with errors_at(f"{where}, document {part.number}"):
                packer.pack([part.text], [part.ends], [part.within_word])
        raise


def _batches(pieces: Iterable[Piece], packer: Packer, counts: ShardCounts, where: str) -> Iterator[list[_Part]]:
    """The documents that have a word, in parts short enough to encode."""
    batch: list[_Part] = []
    size, eos = 0, packer.tokenizer.special.eos
    for number, (document, prompt) in enumerate(by_document(pieces), 1):
        if (texts := from_first_word(document, where)) is None:
            counts.empty += 1
            continue
        marked, before = False, ""
        parts: Iterator[str | None] = chain(packer.cutter.parts(texts), [None])
        for part, following in pairwise(parts):
            assert part is not None
            marked = marked or (eos is not None and eos in before[-len(eos) :] + part)
            within_word = bool(before) and not (before[-1].isspace() or part[0].isspace())
            batch.append(_Part(part, following is None, within_word, min(prompt, len(part)), number))
            before, prompt, size = part, max(prompt - len(part), 0), size + len(part)
            if size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
        counts.marked += marked
    if batch:
        yield batch
    counts.unsafe_cuts, packer.cutter.unsafe = packer.cutter.unsafe, 0


def _documents(texts: np.ndarray, carried: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The counts of each document that ends in a batch, and of the unfinished one after them; see `COLUMNS`."""
    totals = np.cumsum(np.vstack([carried, texts[:, :COLUMNS]]), axis=0)[1:]
    closed = totals[texts[:, COLUMNS].astype(bool)]
    unfinished = totals[-1] - (closed[-1] if len(closed) else 0)
    return np.diff(closed, axis=0, prepend=np.zeros((1, COLUMNS), dtype=np.int64)), unfinished


def _chunks(batch: EncodedBatch, sizes: np.ndarray, carried: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """The counts of the chunks that end in a batch, and of each token after the last of these; see `COLUMNS`."""
    in_bytes = sizes[batch.tokens]
    tokens = np.stack([np.ones_like(in_bytes), batch.words, in_bytes, in_bytes], axis=1)
    tokens = np.concatenate([carried, tokens])
    end = len(tokens) // chunk * chunk
    return tokens[:end].reshape(-1, chunk, COLUMNS).sum(axis=1), tokens[end:]


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
        return any(most is not None and n >= most for n, most in ((documents, self.documents), (words, self.words)))

    def take(self, rows: np.ndarray, documents: int, words: int) -> int:
        """How many documents of these rows (see `COLUMNS`) fit behind those already kept."""
        fit = len(rows) if self.documents is None else min(len(rows), self.documents - documents)
        if self.words is not None:
            fit = min(fit, int(np.searchsorted(np.cumsum(rows[:, 1]), self.words - words, side="right")))
        return fit


@dataclass(frozen=True)
class PackedText:
    """Text whose shards are packed: what a data set is made of."""

    name: str
    tokenizer: BraidTokenizer
    shards: Sequence[ShardCounts]
    source: dict[str, Any]
    """Where the text came from, as data.json says it."""
    has_prompts: bool

    def assemble(self, folder: Path, out: Path, limit: Limit) -> None:
        """Write the data set inside the work folder, then rename it to `out`, replacing what was there."""
        final, every = folder / "final", range(len(self.shards))
        totals = join(folder / "shards", final, every, limit, token_dtype(self.tokenizer.vocab_size), self.has_prompts)
        if not totals.documents:
            todo = "The first document is longer than the limit: raise it."
            raise BraidError("the limit leaves no document", todo=todo)
        self.tokenizer.save(final / "tokenizer")
        write_json(final / MANIFEST, asdict(self.manifest(totals)))
        if out.exists():
            os.rename(out, folder / "replaced")
        os.rename(final, out)

    def manifest(self, totals: ShardCounts) -> Manifest:
        """The manifest of the data set, in which there is so much of the text."""
        empty, dtype = sum(shard.empty for shard in self.shards), token_dtype(self.tokenizer.vocab_size)
        return Manifest(
            self.name,
            **{key: getattr(totals, key) for key in ("tokens", "documents", "words", "bytes")},
            dtype=dtype.name,  # type: ignore[arg-type]
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            tokenizer=self.tokenizer.fingerprint,
            source=self.source | {"empty_documents": empty, "braidlm": __version__},
            targets=self.targets(totals),
        )

    def targets(self, counts: ShardCounts) -> TargetCounts | None:
        """How much is to be predicted; None where all is."""
        return TargetCounts(counts.targets, counts.target_bytes) if self.has_prompts else None


def join(
    shards_folder: Path, final: Path, indices: Sequence[int], limit: Limit, dtype: np.dtype, has_prompts: bool
) -> ShardCounts:
    """Join the shards' files up to the limit into the files of a data set, in a new folder; returns their counts."""
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    totals = ShardCounts()
    # The files that have an entry per token, with its bytes.
    per_token = {"tokens": dtype.itemsize, "words": 1} | ({TARGETS: 1} if has_prompts else {})
    names = (*per_token, "documents", "lengths", *(["target_bytes"] if has_prompts else []))
    with _synced_files({name: final / f"{name}.bin" for name in names}) as files:
        np.zeros(1, dtype=np.int64).tofile(files["documents"])
        for index in indices:
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
                totals.target_bytes += target_size
                if not whole:
                    break
            for name, itemsize in per_token.items():
                path = shards_folder / f"{index:06d}.{name}"
                totals.targets += _copy(path, files[name], shard_tokens * itemsize, name == TARGETS)
            totals.tokens += shard_tokens
            if not whole:
                break
    return totals


def _document_rows(path: Path) -> Iterator[np.ndarray]:
    """The counts of each document of a shard, some at a time: one shard may have a hundred million."""
    with open(path, "rb") as file:
        while len(rows := np.fromfile(file, dtype=np.int64, count=COLUMNS * DOCUMENTS)):
            yield rows.reshape(-1, COLUMNS)


def _copy(path: Path, target: BinaryIO, size: int, counted: bool = False) -> int:
    """Copy the first `size` bytes of a file; returns their sum if `counted`, else 0."""
    total = 0
    with open(path, "rb") as file:
        while size > 0 and (block := file.read(min(BLOCK, size))):
            target.write(block)
            size -= len(block)
            total += int(np.frombuffer(block, np.uint8).sum(dtype=np.int64)) if counted else 0
    assert size == 0, f"{path} is shorter than its counts say"
    return total
