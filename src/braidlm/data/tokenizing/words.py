"""Exact words per token: which token each word of a text begins in, for whole batches at once.

A word is what `str.split()` says it is, so the counts of a document's tokens sum to `len(text.split())`, always.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from braidlm.core.errors import BraidError

_LAST_SPACE = 0x3000
_IS_SPACE = np.array([chr(point).isspace() for point in range(_LAST_SPACE + 1)] + [False])
"""Whether str.split() parts words at a code point; the last entry stands for all that follow."""
MOST = 255
"""words.bin holds one byte a token."""
PART_CHARS = 1 << 16
"""A much longer text is handled in parts: the tokenizer library needs a hundred times the memory of its text."""


class TextBatch:
    """Several texts as one array of code points, with the places of their words and bytes."""

    def __init__(self, texts: Sequence[str]):
        # A newline between texts keeps the last word of one and the first of the next apart.
        points = np.frombuffer("\n".join(texts).encode("utf-32-le"), dtype="<u4")
        space = _IS_SPACE[np.minimum(points, _LAST_SPACE + 1)]
        begins = ~space
        begins[1:] &= space[:-1]
        widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
        byte_at = np.concatenate(([0], np.cumsum(widths)))

        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self.first_char = np.cumsum(lengths + 1) - (lengths + 1)
        self.first_byte = byte_at[self.first_char]
        self.bytes = byte_at[self.first_char + lengths] - self.first_byte
        self.word_chars = np.flatnonzero(begins)
        """Where words begin, in code points of the whole batch."""
        self.word_bytes = byte_at[self.word_chars]
        """The same in bytes."""
        ends = np.append(self.first_char[1:], len(points) + 1)
        self.words = np.searchsorted(self.word_chars, ends) - np.searchsorted(self.word_chars, self.first_char)

    def words_by_length(self, token_bytes: np.ndarray, tokens_per_text: np.ndarray) -> np.ndarray | None:
        """Words that begin in each token, from the bytes that tokens stand for; None if they do not add up."""
        ends = np.cumsum(token_bytes)
        text_ends = np.cumsum(tokens_per_text)
        totals = np.concatenate(([0], ends))[text_ends]
        if not np.array_equal(np.diff(totals, prepend=0), self.bytes):
            return None
        # Tokens are laid end to end; each text begins one byte later for every newline before it.
        starts = ends - token_bytes + np.repeat(np.arange(len(tokens_per_text)), tokens_per_text)
        return _count(self.word_bytes, starts)

    def words_by_offset(self, offsets: Sequence[np.ndarray]) -> np.ndarray:
        """The same from the code point at which each token of each text begins (tokenizers that change the text).

        A word that no token covers counts for the token before it, so that the sum stays exact.
        """
        counts = []
        for index, starts in enumerate(offsets):
            low, count = np.searchsorted(self.word_chars, self.first_char[index]), self.words[index]
            words = self.word_chars[low : low + count] - self.first_char[index]
            counts.append(_count(words, np.maximum.accumulate(starts)))
        return np.concatenate(counts)


def parts_of(text: str) -> Iterator[str]:
    """A long text in parts, cut between a letter or digit and a space, which no usual pattern keeps together."""
    start = 0
    while len(text) - start > 2 * PART_CHARS and (cut := _letter_then_space(text, start + PART_CHARS)) is not None:
        yield text[start:cut]
        start = cut
    yield text[start:] if start else text


def _letter_then_space(text: str, at: int) -> int | None:
    while (at := text.find(" ", at)) >= 0:
        if text[at - 1].isalnum():
            return at
        at += 1
    return None


def _count(positions: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """How many positions fall into the span that begins at each start."""
    if not len(starts):
        return np.zeros(0, dtype=np.uint8)
    spans = np.maximum(np.searchsorted(starts, positions, side="right") - 1, 0)
    counts = np.bincount(spans, minlength=len(starts))
    if counts.max(initial=0) > MOST:
        raise BraidError(
            f"this tokenizer has tokens that stand for more than {MOST} words",
            todo="It leaves most of this text unknown: choose another (`--tokenizer bpe` trains one on it).",
        )
    return counts.astype(np.uint8)
