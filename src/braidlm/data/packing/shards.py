"""Encode documents, count words, and write the token files of one shard."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from braidlm.core.errors import BraidError, errors_at
from braidlm.core.files import explained_disk_errors, write_json
from braidlm.core.reading import read_json
from braidlm.data.packing.packed_data import token_dtype
from braidlm.data.sources.format import Piece, by_document, from_first_word
from braidlm.data.tokenizing.cutting import Cutter
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.data.tokenizing.words import AddedSpaces, TextBatch
from braidlm.model.config.ranges import CountOrZero
from braidlm.model.config.strict import decode

BATCH_CHARS = 1 << 18
"""Text encoded at a time: enough for vectorised counting, little enough for small memory."""
MAX_DOCUMENT_BYTES = (1 << 32) - 1
"""lengths.bin has four bytes for each number."""
FILES = ("tokens", "words", "documents")
TARGETS = "targets"
"""The file of a shard in which only some tokens are targets."""
COLUMNS = 4
"""The numbers of each document in the documents' file: tokens, words, bytes, and the bytes of targets."""


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


@dataclass
class EncodedBatch:
    """Encoded texts, one after another, with EOS where a document ends."""

    tokens: np.ndarray
    words: np.ndarray
    """Words that begin in each token."""
    targets: np.ndarray
    """uint8: 1 for each token that is to be predicted."""
    texts: np.ndarray
    """[texts, 5]: tokens, words, bytes, bytes of targets, and whether a document ends."""
    empty: int
    """Texts that gave no token at all (a normaliser may remove every character) and were left out."""


class Packer:
    """Encodes batches of texts with one tokenizer."""

    def __init__(self, tokenizer: BraidTokenizer, has_prompts: bool = False):
        """`has_prompts` says that not every token is a target, so that shards have a file of targets."""
        self.tokenizer, self.has_prompts = tokenizer, has_prompts
        self.cutter = Cutter(tokenizer)
        self.dtype = token_dtype(tokenizer.vocab_size)

    def pack(
        self,
        texts: Sequence[str],
        ends: Sequence[bool],
        within_word: Sequence[bool] | None = None,
        prompts: Sequence[int] | None = None,
    ) -> EncodedBatch:
        """Encode texts; `ends` says which of them end a document and get an EOS, `within_word` which begin within one.

        A text that does not end a document is followed by its next part. `prompts` are the characters at the beginning
        of each text that are only read: a token that reaches beyond them is a target, and the EOS is one.
        """
        spans = TextBatch(texts, within_word)
        prompts = prompts or [0] * len(texts)
        prompt_bytes = np.array([len(text[:count].encode()) for text, count in zip(texts, prompts, strict=True)])
        ids, counts, words, token_ends, in_bytes = self._encode(texts, spans)
        targets = (token_ends > np.repeat(prompt_bytes if in_bytes else prompts, counts)).astype(np.uint8)
        kept = counts > 0
        if not kept.all() and not all(ends):
            raise BraidError(
                "the tokenizer gives no tokens at all for a part of a long text", todo="Choose another tokenizer."
            )
        ending = np.array(ends) & kept
        eos = self.tokenizer.eos_id
        if eos is not None:
            positions = np.cumsum(counts)[ending]
            ids, words = np.insert(ids, positions, eos), np.insert(words, positions, 0)
            targets = np.insert(targets, positions, 1)
            counts = counts + ending
        rows = np.stack([counts, spans.words, spans.bytes, spans.bytes - prompt_bytes, ending], axis=1)[kept]
        return EncodedBatch(ids.astype(self.dtype), words, targets, rows, int((~kept).sum()))

    def _encode(
        self, texts: Sequence[str], spans: TextBatch
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool]:
        """Ids, tokens per text, words per token, where each token ends in its text, and whether that is in bytes."""
        if self.tokenizer.is_plain_bytes:
            ids = np.frombuffer("".join(texts).encode("utf-8"), dtype=np.uint8).astype(np.int64)
            words = spans.words_by_length(np.ones_like(ids), spans.bytes)
            assert words is not None, "bytes always add up"
            return ids, spans.bytes, words, _ends_within(np.ones_like(ids), spans.bytes), True
        backend = self.tokenizer.backend
        if self._token_bytes is not None:
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
            ids, counts = _flat([encoding.ids for encoding in encodings])
            sizes = self._token_bytes[ids]
            if self.tokenizer.space_before != "nothing":  # a first token has a space that is not in the text
                first = (np.cumsum(counts) - counts)[counts > 0]
                sizes[first] -= [text[:1] != " " for text, count in zip(texts, counts, strict=True) if count]
                if self._added_spaces is not None:
                    sizes -= self._added_spaces.of(ids, first)
            words = spans.words_by_length(sizes, counts)
            if words is not None:
                return ids, counts, words, _ends_within(sizes, counts), True
        # The tokens do not spell the text, which was normalised, so offsets are needed.
        encodings = backend.encode_batch(list(texts), add_special_tokens=False)
        ids, counts = _flat([encoding.ids for encoding in encodings])
        offsets = [np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) for encoding in encodings]
        words = spans.words_by_offset([pairs[:, 0] for pairs in offsets])
        return ids, counts, words, np.concatenate(offsets)[:, 1], False

    @cached_property
    def _added_spaces(self) -> AddedSpaces | None:
        return AddedSpaces(self.tokenizer.token_bytes) if self.tokenizer.space_before == "lines" else None

    @cached_property
    def _token_bytes(self) -> np.ndarray | None:
        """The number of bytes of each id, for byte-level tokenizers."""
        if not self.tokenizer.is_byte_level:
            return None
        lengths = np.zeros(self.tokenizer.vocab_size, dtype=np.int64)
        for token, index in self.tokenizer.backend.get_vocab(with_added_tokens=True).items():
            lengths[index] = len(token)
        for index, added in self.tokenizer.backend.get_added_tokens_decoder().items():
            lengths[index] = len(added.content.encode("utf-8"))
        # Some byte-level tokenizers put a space before every text; then the lengths never add up.
        probe = self.tokenizer.encode("a b")
        return lengths if lengths[probe].sum() == len("a b") else None


def pack_shard(pieces: Iterable[Piece], packer: Packer, folder: Path, index: int, where: str) -> ShardCounts:
    """Write one shard's tokens, words and document counts; `NNNNNN.json` appears last."""
    counts, open_document = ShardCounts(), np.zeros(COLUMNS, dtype=np.int64)
    names = (*FILES, *([TARGETS] if packer.has_prompts else []))
    scratch = {name: folder / f"{index:06d}.{name}.{os.getpid()}" for name in names}
    with explained_disk_errors(folder):
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context(open(path, "wb")) for name, path in scratch.items()}
            for parts in _batches(pieces, packer, counts, where):
                batch = _encoded(parts, packer, where)
                rows, open_document = _documents(batch.texts, open_document)
                if max(open_document[2], rows[:, 2].max(initial=0)) > MAX_DOCUMENT_BYTES:
                    raise BraidError("a document has more than 4 GiB", where, "Divide it into several documents.")
                arrays = {"tokens": batch.tokens, "words": batch.words, "documents": rows, TARGETS: batch.targets}
                for name, file in files.items():
                    file.write(arrays[name].tobytes())
                counts.empty += batch.empty
                counts.tokens += len(batch.tokens)
                counts.documents += len(rows)
                counts.words += int(batch.texts[:, 1].sum())
                counts.bytes += int(batch.texts[:, 2].sum())
                counts.targets += int(batch.targets.sum(dtype=np.int64))
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for name, path in scratch.items():
            os.replace(path, folder / f"{index:06d}.{name}")
        write_json(folder / f"{index:06d}.json", asdict(counts))
    return counts


def remove_scratch_files(folder: Path) -> None:
    """Remove what a killed process had written of its shard."""
    for path in folder.glob("*.*.*"):
        path.unlink(missing_ok=True)


def finished_shard(
    folder: Path, index: int, dtype: np.dtype, vocab_size: int, has_prompts: bool = False
) -> ShardCounts | None:
    """The counts of a shard that is finished and complete; None if it has to be packed, also because it is damaged."""
    try:
        counts = decode(ShardCounts, read_json(folder / f"{index:06d}.json"))
        dtypes: tuple[np.dtype, ...] = (dtype, np.dtype(np.uint8), np.dtype(np.int64))
        tokens, words, rows = (
            np.memmap(folder / f"{index:06d}.{name}", dtype=kind, mode="r") if counts.documents else np.zeros(0, kind)
            for name, kind in zip(FILES, dtypes, strict=True)
        )
        totals = rows.reshape(-1, COLUMNS).sum(axis=0).tolist()
        targets = counts.targets
        if has_prompts:
            targets = int(np.fromfile(folder / f"{index:06d}.{TARGETS}", dtype=np.uint8).sum(dtype=np.int64))
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
    for number, document in enumerate(by_document(pieces), 1):
        texts = from_first_word(document.texts, where)
        if texts is None:
            counts.empty += 1
            continue
        marked, before, prompt = False, "", document.prompt
        for part, ends in _with_end(packer.cutter.parts(texts)):
            marked = marked or (eos is not None and eos in before[-len(eos) :] + part)
            within_word = bool(before) and not (before[-1].isspace() or part[0].isspace())
            batch.append(_Part(part, ends, within_word, min(prompt, len(part)), number))
            before, prompt, size = part, max(prompt - len(part), 0), size + len(part)
            if size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
        counts.marked += marked
    if batch:
        yield batch
    counts.unsafe_cuts, packer.cutter.unsafe = packer.cutter.unsafe, 0


def _with_end(parts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Each part with whether it is the last."""
    current = next(parts)
    for following in parts:
        yield current, False
        current = following
    yield current, True


def _documents(texts: np.ndarray, carried: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The counts of each document that ends in a batch, and of the unfinished one after them; see `COLUMNS`."""
    totals = np.cumsum(np.vstack([carried, texts[:, :COLUMNS]]), axis=0)[1:]
    closed = totals[texts[:, COLUMNS].astype(bool)]
    unfinished = totals[-1] - (closed[-1] if len(closed) else 0)
    return np.diff(closed, axis=0, prepend=np.zeros((1, COLUMNS), dtype=np.int64)), unfinished


def _ends_within(lengths: np.ndarray, tokens_per_text: np.ndarray) -> np.ndarray:
    """Where each token ends in its text, from the lengths of all tokens."""
    ends = np.cumsum(lengths)
    before = np.concatenate(([0], ends))[np.cumsum(tokens_per_text) - tokens_per_text]
    return np.asarray(ends - np.repeat(before, tokens_per_text))


def _flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.fromiter((index for row in rows for index in row), dtype=np.int64, count=int(counts.sum()))
    return flat, counts
