"""Exact words per token: which token each word of a text begins in, for whole batches at once.

A word is what `str.split()` says it is, so the counts of a document's tokens sum to `len(text.split())`, always.
"""

from collections.abc import Sequence

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.tokenizer import BETWEEN_LINES

_LAST_SPACE = 0x3000
_IS_SPACE = np.array([chr(point).isspace() for point in range(_LAST_SPACE + 1)] + [False])
"""Whether str.split() splits at a code point; the last entry stands for all that follow."""
MAX_WORDS_PER_TOKEN = 255
"""words.bin has one byte per token."""


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
        self.first_byte = byte_at[self.first_char]
        self.bytes = byte_at[self.first_char + lengths] - self.first_byte
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
        text_ends = np.cumsum(tokens_per_text)
        totals = np.concatenate(([0], ends))[text_ends]
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
        for index, starts in enumerate(offsets):
            low, count = np.searchsorted(self.word_chars, self.first_char[index]), self.words[index]
            words = self.word_chars[low : low + count] - self.first_char[index]
            counts.append(_count(words, np.maximum.accumulate(starts)))
        return np.concatenate(counts)


def _count(positions: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """How many positions fall into the span that begins at each start."""
    if not len(starts):
        return np.zeros(0, dtype=np.uint8)
    spans = np.maximum(np.searchsorted(starts, positions, side="right") - 1, 0)
    counts = np.bincount(spans, minlength=len(starts))
    if counts.max(initial=0) > MAX_WORDS_PER_TOKEN:
        raise BraidError(
            f"this tokenizer has tokens that stand for more than {MAX_WORDS_PER_TOKEN} words",
            todo="It leaves most of this text unknown: choose another (`--tokenizer bpe` trains one on it).",
        )
    return counts.astype(np.uint8)


class AddedSpaces:
    """Counts the bytes of tokens that are spaces between lines, added by a tokenizer."""

    def __init__(self, token_bytes: list[bytes | None]):
        line, spaced = (text.encode() for text in BETWEEN_LINES)
        spelled = [token or b"" for token in token_bytes]
        self.within = np.array([token.count(spaced) for token in spelled])
        self.ends_line = np.array([token.endswith(line) for token in spelled])
        self.begins_with_space = np.array([token.startswith(b" ") for token in spelled])

    def of(self, ids: np.ndarray, first: np.ndarray) -> np.ndarray:
        """The added spaces of each token; `first` are the indices of tokens that begin texts."""
        after_line = np.roll(self.ends_line[ids], 1)
        after_line[first] = False
        added: np.ndarray = self.within[ids] + (after_line & self.begins_with_space[ids])
        return added
