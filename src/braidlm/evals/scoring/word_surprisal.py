"""The surprisal of words in context, piece by piece as the BabyLM pipeline's reading task asks for it.

A word is encoded by itself; its first piece is predicted from the context. For each further piece the context with all
pieces before it is encoded anew, as text, and so is the piece: what is predicted is the first token of that. Mostly
these are the tokens that the whole would have; where pieces merge differently in context, they are not, and the numbers
are the pipeline's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.formats.ranked_options import ranges
from braidlm.evals.scoring.forest import Request
from braidlm.evals.scoring.texts import AT_ONCE
from braidlm.evals.scoring.windows import too_long


@dataclass(frozen=True)
class WordRequests:
    """One request for every piece of every word."""

    requests: list[Request]
    words: np.ndarray
    """[requests] which of the words a piece is of."""
    count: int
    """Words."""

    def surprisals(self, sums: np.ndarray) -> np.ndarray:
        """[words] in nats, from the scores of the requests."""
        return np.bincount(self.words, weights=-sums, minlength=self.count)

    def too_long(self, context: int | None) -> dict[str, int]:
        """How many words were given only the end of what stands before them, for a result's notes."""
        return too_long(self.requests, context, ranges(np.bincount(self.words).tolist()))


def word_requests(tokenizer: BraidTokenizer, words: Sequence[tuple[str, str]]) -> WordRequests:
    """Requests for words given as (context, word); equal ones are asked for once for each."""
    texts: list[str] = []
    targets: list[int] = []
    owners: list[int] = []
    coded = tokenizer.encode_batch([word for _, word in words])
    for index, ((context, word), pieces) in enumerate(zip(words, coded, strict=True)):
        if not pieces:
            raise BraidError(f"the tokenizer has no token for the word '{word}'")
        text = context
        for at, piece in enumerate(pieces):
            written = tokenizer.decode([piece])
            texts.append(text)
            targets.append(piece if at == 0 else _first(tokenizer, written, piece))
            owners.append(index)
            text += written
    requests = [
        Request([*ids, target], max(1, len(ids)))
        for ids, target in zip(_contexts(tokenizer, texts), targets, strict=True)
    ]
    return WordRequests(requests, np.array(owners), len(words))


def _first(tokenizer: BraidTokenizer, written: str, piece: int) -> int:
    """The first token of a piece's text; a piece that has no text of its own, part of a character, is itself."""
    ids = tokenizer.encode(written)
    return ids[0] if ids else piece


def _contexts(tokenizer: BraidTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text as a tokenizer begins it; what it adds behind is left out."""
    found: list[list[int]] = []
    for at in range(0, len(texts), AT_ONCE):
        found += map(_without_end, tokenizer.backend.encode_batch(list(texts[at : at + AT_ONCE])))
    return found


def _without_end(encoding: Encoding) -> list[int]:
    ids, special = encoding.ids, encoding.special_tokens_mask
    stop = len(ids)
    while stop > 1 and special[stop - 1]:
        stop -= 1
    return ids[:stop]
