"""Encode documents, count words, and write the token files of one shard."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors, write_json
from braidlm.data.packing.packed_data import token_dtype
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.data.tokenizing.words import PART_CHARS, TextBatch, split_long_text

BATCH_CHARS = 1 << 18
"""Text encoded at a time: enough for vectorised counting, little enough for small memory."""
PROBE = "It's 12 o'clock  now 3.5, said   Zoë Ärm \n\n to 你好 x: the end of\tit all 7 \n."
"""A text with all kinds of spaces, which shows whether a tokenizer may encode a document in parts."""
WORD_PRE_TOKENIZERS = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
FILES = ("tokens", "words", "documents")


@dataclass
class ShardCounts:
    """What one packed shard contains; its file is written last, so a shard with this file is finished."""

    tokens: int = 0
    documents: int = 0
    words: int = 0
    bytes: int = 0
    empty: int = 0
    """Documents without a word, which were left out."""
    marked: int = 0
    """Documents that contain the end-of-text token as plain text."""


@dataclass
class EncodedBatch:
    """Encoded texts: concatenated tokens with EOS, words per token, and [tokens, words, bytes, ends] of each text."""

    tokens: np.ndarray
    words: np.ndarray
    texts: np.ndarray
    empty: int
    """Texts that gave no token at all (a normaliser may remove every character) and were left out."""


class Packer:
    """Encodes batches of texts with one tokenizer."""

    def __init__(self, tokenizer: BraidTokenizer):
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)

    def pack(self, texts: Sequence[str], ends: Sequence[bool]) -> EncodedBatch:
        """Encode texts; `ends` says which of them end a document and get an EOS."""
        spans = TextBatch(texts)
        ids, counts, words = self._encode(texts, spans)
        kept = counts > 0
        if any(len(texts[index]) >= PART_CHARS for index in np.flatnonzero(~kept).tolist()):
            # It could be a part of a document, which cannot be left out.
            raise BraidError("the tokenizer gives no tokens at all for a long text", todo="Choose another tokenizer.")
        ending = np.array(ends) & kept
        eos = self.tokenizer.eos_id
        if eos is not None:
            positions = np.cumsum(counts)[ending]
            ids, words = np.insert(ids, positions, eos), np.insert(words, positions, 0)
            counts = counts + ending
        rows = np.stack([counts, spans.words, spans.bytes, ending], axis=1)[kept]
        return EncodedBatch(ids.astype(self.dtype), words, rows, int((~kept).sum()))

    def _encode(self, texts: Sequence[str], spans: TextBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self.tokenizer.is_plain_bytes:
            ids = np.frombuffer("".join(texts).encode("utf-8"), dtype=np.uint8).astype(np.int64)
            words = spans.words_by_length(np.ones_like(ids), spans.bytes)
            assert words is not None, "bytes always add up"
            return ids, spans.bytes, words
        backend = self.tokenizer.backend
        if self._token_bytes is not None:
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
            ids, counts = _flat([encoding.ids for encoding in encodings])
            words = spans.words_by_length(self._token_bytes[ids], counts)
            if words is not None:
                return ids, counts, words
        # The tokens do not spell the text (it was normalised, or a space was put before it), so offsets are needed.
        encodings = backend.encode_batch(list(texts), add_special_tokens=False)
        ids, counts = _flat([encoding.ids for encoding in encodings])
        starts = [np.array([start for start, _ in encoding.offsets], dtype=np.int64) for encoding in encodings]
        return ids, counts, spans.words_by_offset(starts)

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

    @cached_property
    def can_split(self) -> bool:
        """Whether a text can be encoded in parts, each but the first beginning with a space, for the same tokens."""
        if self.tokenizer.is_plain_bytes:
            return True
        definition = self.tokenizer.definition
        # An added token with a space inside would be cut in two; special tokens are never searched for in text.
        added = definition.get("added_tokens", [])
        if any(" " in token["content"] and not token.get("special") for token in added):
            return False
        cuts = [at for at in range(1, len(PROBE)) if PROBE[at] == " " and PROBE[at - 1].isalnum()]
        whole, encode = self.tokenizer.encode(PROBE), self.tokenizer.encode
        return _separates_words(definition.get("pre_tokenizer")) and all(
            encode(PROBE[:cut]) + encode(PROBE[cut:]) == whole for cut in cuts
        )

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """A document as (text, whether it ends the document): one part unless it is long and can be split."""
        parts = split_long_text(text) if self.can_split else iter([text])
        current = next(parts)
        for following in parts:
            yield current, False
            current = following
        yield current, True


def pack_shard(documents: Iterable[str], packer: Packer, folder: Path, index: int) -> ShardCounts:
    """Write one shard's tokens, words and document counts; `NNNNNN.json` appears last."""
    counts, open_document = ShardCounts(), np.zeros(3, dtype=np.int64)
    scratch = {name: folder / f"{index:06d}.{name}.{os.getpid()}" for name in FILES}
    with explained_disk_errors(folder):
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context(open(path, "wb")) for name, path in scratch.items()}
            for texts, ends in _batches(documents, packer, counts):
                batch = packer.pack(texts, ends)
                rows, open_document = _documents(batch.texts, open_document)
                for name, array in (("tokens", batch.tokens), ("words", batch.words), ("documents", rows)):
                    files[name].write(array.tobytes())
                counts.empty += batch.empty
                counts.tokens += len(batch.tokens)
                counts.documents += len(rows)
                counts.words += int(batch.texts[:, 1].sum())
                counts.bytes += int(batch.texts[:, 2].sum())
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for name, path in scratch.items():
            os.replace(path, folder / f"{index:06d}.{name}")
        write_json(folder / f"{index:06d}.json", asdict(counts))
    return counts


def finished_shard(folder: Path, index: int, dtype: np.dtype) -> ShardCounts | None:
    """The counts of a shard that is finished and complete; None if it has to be packed."""
    marker = folder / f"{index:06d}.json"
    try:
        counts = ShardCounts(**json.loads(marker.read_text()))
        sizes = [(folder / f"{index:06d}.{name}").stat().st_size for name in FILES]
    except (OSError, ValueError, TypeError):
        return None
    return counts if sizes == [counts.tokens * dtype.itemsize, counts.tokens, counts.documents * 24] else None


def _batches(documents: Iterable[str], packer: Packer, counts: ShardCounts) -> Iterator[tuple[list[str], list[bool]]]:
    eos = packer.tokenizer.special.eos
    texts: list[str] = []
    ends: list[bool] = []
    size = 0
    for document in documents:
        if not document.strip():
            counts.empty += 1
            continue
        counts.marked += eos is not None and eos in document
        for text, last in packer.parts(document):
            texts.append(text)
            ends.append(last)
            size += len(text)
            if size >= BATCH_CHARS:
                yield texts, ends
                texts, ends, size = [], [], 0
    if texts:
        yield texts, ends


def _documents(texts: np.ndarray, carried: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[tokens, words, bytes] of each document that ends in a batch, and of the unfinished one after them."""
    totals = np.cumsum(np.vstack([carried, texts[:, :3]]), axis=0)[1:]
    closed = totals[texts[:, 3].astype(bool)]
    unfinished = totals[-1] - (closed[-1] if len(closed) else 0)
    return np.diff(closed, axis=0, prepend=np.zeros((1, 3), dtype=np.int64)), unfinished


def _separates_words(pre_tokenizer: Any) -> bool:
    """Whether a pre-tokenizer separates words, so that no token can extend from a letter over a space."""
    if not pre_tokenizer:
        return False
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return any(_separates_words(step) for step in pre_tokenizer["pretokenizers"])
    if kind == "Split":
        return pre_tokenizer.get("behavior") in ("Isolated", "Removed")
    regex, split = pre_tokenizer.get("use_regex"), pre_tokenizer.get("split")
    return kind in WORD_PRE_TOKENIZERS or bool(kind == "ByteLevel" and regex) or bool(kind == "Metaspace" and split)


def _flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.fromiter((index for row in rows for index in row), dtype=np.int64, count=int(counts.sum()))
    return flat, counts
