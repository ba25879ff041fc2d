"""Spaces that a tokenizer puts before texts and lines, so that a first word is the token that it is elsewhere."""

from typing import Any, Literal

import numpy as np

SpaceBefore = Literal["nothing", "texts", "lines"]
"""What a space is put before: texts that have none, or these and every further line."""
BETWEEN_LINES = ("\n", "\n ")
"""The end of a line, and what the normalizer makes of it; decoding turns it back. A line that begins with spaces gets
one more, so that none is lost."""


def space_before(definition: dict[str, Any]) -> SpaceBefore:
    """What a tokenizer puts a space before, by its definition."""
    split = definition.get("pre_tokenizer", {})
    if split.get("type") != "ByteLevel" or "add_prefix_space" not in split:
        return "nothing"
    line, spaced = BETWEEN_LINES
    between = {"type": "Replace", "pattern": {"String": line}, "content": spaced}
    return "lines" if definition.get("normalizer") == between else "texts"


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
