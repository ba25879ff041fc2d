"""Long documents in sections, cut where lines end, so that a share of one text can be chosen."""

from collections.abc import Iterable, Iterator

from braidlm.data.sources.format import Piece


def in_sections(pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
    """The same text with a document for each section: `size` bytes and the rest of their line.

    Blank lines stay with the text before them, because a document without a word would be dropped.
    """
    section, written, has_words, is_full = "", 0, False, False
    for text, ends, prompt in pieces:
        for line in text.splitlines(keepends=True):
            if is_full and not line.isspace():
                end = section.rfind("\n") + 1  # the beginning of this line may have been in the piece before
                yield Piece(section[:end], True)
                section, has_words, is_full = section[end:], False, False
                written = len(section.encode())
            section += line
            written += len(line.encode())
            has_words = has_words or not line.isspace()
            is_full = is_full or (written >= size and has_words and line.endswith("\n"))
        if ends or (section and not is_full):
            yield Piece(section, ends, prompt)
            section = ""
        if ends:
            written, has_words, is_full = 0, False, False
