"""The surprisal of words in context, token by token as the BabyLM pipeline's reading task computes it.

A word is encoded by itself; its first token is predicted from the context. For each further token the text of the
context with all tokens before it is encoded again, and so is the token's text, whose first token is predicted. Mostly
these are the tokens of the whole; where tokens merge differently in context, they are not, and the numbers are the
pipeline's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.scoring.requests import BATCH, Request, consecutive_ranges, strip_final_specials
from braidlm.evals.scoring.windows import too_long


@dataclass(frozen=True)
class WordRequests:
    """One request for every token of every word."""

    requests: list[Request]
    words: np.ndarray
    """[requests] the index of the word that the token is part of."""
    count: int
    """Words."""

    def surprisals(self, sums: np.ndarray) -> np.ndarray:
        """[words] in nats, from the scores of the requests."""
        return np.bincount(self.words, weights=-sums, minlength=self.count)

    def too_long(self, context: int | None) -> dict[str, int]:
        """How many words had a truncated context, for a result's notes."""
        return too_long(self.requests, context, consecutive_ranges(np.bincount(self.words).tolist()))


def word_requests(tokenizer: BraidTokenizer, words: Sequence[tuple[str, str]]) -> WordRequests:
    """Requests for words given as (context, word)."""
    texts: list[str] = []
    targets: list[int] = []
    owners: list[int] = []
    encoded = tokenizer.encode_batch([word for _, word in words])
    for index, ((context, word), tokens) in enumerate(zip(words, encoded, strict=True)):
        if not tokens:
            raise BraidError(f"the tokenizer has no token for the word '{word}'")
        text = context
        for at, token in enumerate(tokens):
            decoded = tokenizer.decode([token])
            texts.append(text)
            targets.append(token if at == 0 else _first(tokenizer, decoded, token))
            owners.append(index)
            text += decoded
    requests = [
        Request([*ids, target], max(1, len(ids)))
        for ids, target in zip(_contexts(tokenizer, texts), targets, strict=True)
    ]
    return WordRequests(requests, np.array(owners), len(words))


def _first(tokenizer: BraidTokenizer, text: str, token: int) -> int:
    """The first token of a token's text; a token without a text, part of a character, is itself."""
    ids = tokenizer.encode(text)
    return ids[0] if ids else token


def _contexts(tokenizer: BraidTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text with the special tokens before it, and without those after it."""
    contexts: list[list[int]] = []
    for start in range(0, len(texts), BATCH):
        encodings = tokenizer.backend.encode_batch(list(texts[start : start + BATCH]))
        contexts += [strip_final_specials(encoding, keep=1) for encoding in encodings]
    return contexts
