"""The two halves of held-out text: recipes are chosen by one, and what was chosen is reported on the other.

Documents in their order make blocks of 16 KiB or more, and the blocks go to the halves in turn: neighbours stay
together, every source is in both halves, and the text alone says which half a document is in, whatever the tokenizer.
A document of a text file that is longer than a block, as a transcript without blank lines is, is first cut at the ends
of lines into sections of that size. Each byte is in exactly one half.
"""

from collections.abc import Iterable
from typing import Literal, get_args

from braidlm.core.errors import BraidError

Half = Literal["choose", "report"]
BLOCK_BYTES = 16_384
"""The least bytes of a block; only the last one may have fewer."""


def documents_of_half(sizes: Iterable[int], half: Half, where: str) -> list[int]:
    """The numbers of the documents of a half, for the bytes of all documents in their order."""
    turn, filled, turns = 0, 0, []
    for size in sizes:
        turns.append(turn)
        filled += size
        if filled >= BLOCK_BYTES:
            turn, filled = 1 - turn, 0
    if len(set(turns)) < 2:
        what = f"the held-out text is too short for two halves: they are blocks of {BLOCK_BYTES:,} bytes in turn"
        raise BraidError(what, where, "Hold out more text, or leave out `half`.")
    return [number for number, turn in enumerate(turns) if turn == get_args(Half).index(half)]
