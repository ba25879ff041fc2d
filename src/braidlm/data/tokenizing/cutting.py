"""Cut a long text into parts whose tokens, one part after another, are the tokens of the whole text.

The tokenizer library needs a hundred times the memory of a text that it encodes at once. A tokenizer divides a text
into words before it makes tokens, so a cut between two such words changes nothing. What its words are depends on the
tokenizer: the text around a place is encoded with and without the cut, and only where that is equal the text is cut.
"""

import re
from collections.abc import Iterable, Iterator

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


class Cutter:
    """Cuts texts for one tokenizer."""

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
