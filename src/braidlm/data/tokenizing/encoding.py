"""Documents into tokens, a part at a time, with exact counts of the words that begin in each token.

A word is what `str.split()` says it is, so the counts of a document's tokens sum to `len(text.split())`, always.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.tokenizer import BraidTokenizer

PART_CHARS = 1 << 16
"""The length from which a place to cut is searched."""
MAX_PART_CHARS = 8 * PART_CHARS
"""The length at which a text is cut even where that may change tokens."""
AROUND = 128
"""The characters on either side of a place that are encoded with and without the cut."""
TRIES = 4
"""Places of a kind that are tried before the search goes on further back."""
WORD_END = re.compile(r"(?<=\w)(?=\s)")
CLASS_CHANGE = re.compile(r"(?<=[^\W\d_])(?=[\W\d_])|(?<=\d)(?=\D)")
_LAST_SPACE = 0x3000
_IS_SPACE = np.array([chr(point).isspace() for point in range(_LAST_SPACE + 1)] + [False])
"""Whether str.split() splits at a code point; the last entry stands for all that follow."""
MAX_WORDS_PER_TOKEN = 255
"""words.bin has one byte per token."""


class Cutter:
    """Cuts a long text into parts whose tokens, one part after another, are the tokens of the whole text.

    The tokenizer library needs a hundred times the memory of a text that it encodes at once. A tokenizer divides a text
    into words before it makes tokens, so a cut between two such words changes nothing. What its words are depends on
    the tokenizer: the text around a place is encoded with and without the cut, and only where that is equal the text
    is cut.
    """

    def __init__(self, tokenizer: BraidTokenizer):
        self.tokenizer = tokenizer
        self.unsafe = 0
        """How often there was no place at which a cut leaves the tokens as they are."""

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        """The parts of a text, which may come in pieces of any length; they do not depend on where pieces end."""
        text, searched = "", PART_CHARS
        for piece in pieces:
            text = text + piece if text else piece
            start = 0
            # A place is searched only where all of the text that could decide about it is there.
            while len(text) - start > searched + PART_CHARS + AROUND:
                cut = self._safe_place(text, start + searched)
                searched += PART_CHARS
                if cut is None and searched >= MAX_PART_CHARS:
                    cut = start + searched
                    self.unsafe += not self._is_safe(text, cut)
                if cut is not None:
                    yield text[start:cut]
                    start, searched = cut, PART_CHARS
            text = text[start:] if start else text
        if text:
            yield text

    def encode(self, text: str) -> list[int]:
        """The tokens of a text of any length, without special tokens."""
        return [token for part in self.parts([text]) for token in self.tokenizer.encode(part)]

    def _safe_place(self, text: str, begin: int) -> int | None:
        """A place between `begin` and a part's length after it at which a cut leaves the tokens as they are."""
        for pattern in (WORD_END, CLASS_CHANGE):
            for _, match in zip(range(TRIES), pattern.finditer(text, begin, begin + PART_CHARS), strict=False):
                if self._is_safe(text, match.start()):
                    return match.start()
        return None

    def _is_safe(self, text: str, at: int) -> bool:
        before, after = text[max(0, at - AROUND) : at], text[at : at + AROUND]
        whole, left, right = self.tokenizer.encode_batch([before + after, before, after])
        return left + right == whole


def word_ends(text: str, length: int) -> Iterator[str]:
    """A text in parts of about `length` that end with a word, for counting its words."""
    start = 0
    while len(text) - start > 2 * length and (match := WORD_END.search(text, start + length)):
        yield text[start : match.start()]
        start = match.start()
    yield text[start:] if start else text


class TextBatch:
    """Several texts as one array of code points, with the positions of their words and bytes."""

    def __init__(self, texts: Sequence[str], within_word: Sequence[bool] | None = None):
        """`within_word` says which texts go on with a word that the text before them began."""
        # A newline between texts separates the last word of one from the first of the next.
        points = np.frombuffer("\n".join(texts).encode("utf-32-le"), dtype="<u4")
        space = _IS_SPACE[np.minimum(points, _LAST_SPACE + 1)]
        begins = ~space
        begins[1:] &= space[:-1]
        widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
        byte_at = np.concatenate(([0], np.cumsum(widths)))

        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self.first_char = np.cumsum(lengths + 1) - (lengths + 1)
        self.bytes = byte_at[self.first_char + lengths] - byte_at[self.first_char]
        if within_word is not None:
            begins[self.first_char[np.array(within_word, dtype=bool)]] = False
        self.word_chars = np.flatnonzero(begins)
        """The positions at which words begin, in code points of the whole batch."""
        self.word_bytes = byte_at[self.word_chars]
        """The positions at which words begin, in bytes of the whole batch."""
        ends = np.append(self.first_char[1:], len(points) + 1)
        self.words = np.searchsorted(self.word_chars, ends) - np.searchsorted(self.word_chars, self.first_char)

    def words_by_length(self, token_bytes: np.ndarray, tokens_per_text: np.ndarray) -> np.ndarray | None:
        """Words that begin in each token, from the bytes of each token; None if they do not add up to the texts."""
        ends = np.cumsum(token_bytes)
        totals = np.concatenate(([0], ends))[np.cumsum(tokens_per_text)]
        if not np.array_equal(np.diff(totals, prepend=0), self.bytes):
            return None
        # Each text begins one byte later for every newline that was put between texts.
        starts = ends - token_bytes + np.repeat(np.arange(len(tokens_per_text)), tokens_per_text)
        return _count(self.word_bytes, starts)

    def words_by_offset(self, offsets: Sequence[np.ndarray]) -> np.ndarray:
        """Words that begin in each token, from the code point at which it begins: for tokenizers that change the text.

        A word that no token covers counts for the token before it, so that the sum stays exact.
        """
        counts = []
        for starts, first, count in zip(offsets, self.first_char, self.words, strict=True):
            low = np.searchsorted(self.word_chars, first)
            counts.append(_count(self.word_chars[low : low + count] - first, np.maximum.accumulate(starts)))
        return np.concatenate(counts)


def _count(positions: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """How many positions fall into the span that begins at each start."""
    if not len(starts):
        return np.zeros(0, dtype=np.uint8)
    spans = np.maximum(np.searchsorted(starts, positions, side="right") - 1, 0)
    counts = np.bincount(spans, minlength=len(starts))
    if counts.max(initial=0) > MAX_WORDS_PER_TOKEN:
        todo = "It leaves most of this text unknown: choose another (`--tokenizer bpe` trains one on it)."
        raise BraidError(f"this tokenizer has tokens that stand for more than {MAX_WORDS_PER_TOKEN} words", todo=todo)
    return counts.astype(np.uint8)


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

    def __init__(self, tokenizer: BraidTokenizer):
        self.tokenizer = tokenizer
        self.cutter = Cutter(tokenizer)

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
            what = "the tokenizer gives no tokens at all for a part of a long text"
            raise BraidError(what, todo="Choose another tokenizer.")
        ending = np.array(ends) & kept
        if (eos := self.tokenizer.eos_id) is not None:
            positions = np.cumsum(counts)[ending]
            ids, words = np.insert(ids, positions, eos), np.insert(words, positions, 0)
            targets = np.insert(targets, positions, 1)
            counts = counts + ending
        rows = np.stack([counts, spans.words, spans.bytes, spans.bytes - prompt_bytes, ending], axis=1)[kept]
        return EncodedBatch(ids, words, targets, rows, int((~kept).sum()))

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
            if (words := spans.words_by_length(sizes, counts)) is not None:
                return ids, counts, words, _ends_within(sizes, counts), True
        # The tokens do not spell the text, which was normalised, so offsets are needed.
        encodings = backend.encode_batch(list(texts), add_special_tokens=False)
        ids, counts = _flat([encoding.ids for encoding in encodings])
        offsets = [np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) for encoding in encodings]
        words = spans.words_by_offset([pairs[:, 0] for pairs in offsets])
        return ids, counts, words, np.concatenate(offsets)[:, 1], False

    @property
    def token_sizes(self) -> np.ndarray:
        """[tokens of the vocabulary]: the bytes of text that each token stands for."""
        if self._token_bytes is None:
            what = "the tokens of this tokenizer do not spell the text, so that chunks of them have no size in bytes"
            raise BraidError(what, "chunk_tokens", "Use a byte-level tokenizer, such as `--tokenizer bpe`.")
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> np.ndarray | None:
        """The number of bytes of each id, for byte-level tokenizers."""
        if not self.tokenizer.is_byte_level:
            return None
        lengths = np.array([len(token or b"") for token in self.tokenizer.token_bytes], dtype=np.int64)
        # Some byte-level tokenizers put a space before every text; then the lengths never add up.
        probe = self.tokenizer.encode("a b")
        return lengths if lengths[probe].sum() == len("a b") else None


def _ends_within(lengths: np.ndarray, tokens_per_text: np.ndarray) -> np.ndarray:
    """Where each token ends in its text, from the lengths of all tokens."""
    ends = np.cumsum(lengths)
    before = np.concatenate(([0], ends))[np.cumsum(tokens_per_text) - tokens_per_text]
    return np.asarray(ends - np.repeat(before, tokens_per_text))


def _flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    flat = np.fromiter((index for row in rows for index in row), dtype=np.int64, count=int(counts.sum()))
    return flat, counts
