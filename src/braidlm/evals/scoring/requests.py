"""From text to requests: which tokens of a text are scored, and what precedes the first of them.

A text begins as the model's tokenizer begins it. Tokenizers that `braid prepare` trains, and GPT-2's, add nothing
before a text: its first token has no context to be predicted from and is not scored. Where `tokenizer.json` adds a BOS
token (Llama's `<s>`), it is added here too, and every token is scored. The BabyLM pipeline of 2025 does the same with
the same folder. `begin="bos"` always puts the BOS (or else the EOS) token first, so that every token is scored, as in
lm-evaluation-harness. Special tokens that a tokenizer adds after a text are dropped: nothing is predicted from them.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from tokenizers import Encoding

from braidlm.core.decoding.pauses import pause_tokens
from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.tokenizer import BraidTokenizer

Begin = Literal["tokenizer", "bos"]
BATCH = 10_000
"""Texts that are encoded together; their offsets take memory."""


class Request(NamedTuple):
    """Token ids, of which those from `first` on are scored, each given all before it."""

    ids: Sequence[int]
    first: int = 1


def requests_for(
    tokenizer: BraidTokenizer, texts: Sequence[tuple[str, str]], begin: Begin = "tokenizer", pauses: int = 0
) -> list[Request]:
    """A request for each (context, continuation): the tokens of the whole that reach into the continuation are scored.

    Context and continuation are encoded together, as a model reads them; a continuation includes its leading space.
    `pauses` pause tokens stand between the two.
    """
    waiting = pause_tokens(tokenizer, pauses)
    bos = begin_id(tokenizer) if begin == "bos" else None
    plain = tokenizer.backend.num_special_tokens_to_add(False) == 0
    requests = [_request(encoding, len(context), bos, plain) for encoding, context in _encoded(tokenizer, texts)]
    if not waiting:
        return requests
    return [
        Request([*ids[:first], *waiting, *ids[first:]], first + len(waiting)) if context else Request(ids, first)
        for (ids, first), (context, _) in zip(requests, texts, strict=True)
    ]


def sentence_requests(tokenizer: BraidTokenizer, sentences: Sequence[str], begin: Begin = "tokenizer") -> list[Request]:
    """Whole texts without a context: all tokens are scored (but a first one that has no BOS token before it)."""
    return requests_for(tokenizer, [("", sentence) for sentence in sentences], begin)


def begin_id(tokenizer: BraidTokenizer) -> int:
    """The token that the first token of a text is predicted from: BOS, or else EOS."""
    token = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if token is None:
        raise BraidError("the tokenizer has no token that begins or ends a text", "evaluation")
    return token


def consecutive_ranges(sizes: Sequence[int]) -> list[range]:
    """The index ranges of consecutive groups of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def strip_final_specials(encoding: Encoding, keep: int = 0) -> list[int]:
    """The ids without the special tokens at the end; at least the first `keep` ids stay."""
    ids, special = encoding.ids, encoding.special_tokens_mask
    stop = len(ids)
    while stop > keep and special[stop - 1]:
        stop -= 1
    return ids[:stop]


def _encoded(tokenizer: BraidTokenizer, texts: Sequence[tuple[str, str]]) -> Iterator[tuple[Encoding, str]]:
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        whole = [context + continuation for context, continuation in batch]
        # Character offsets locate the continuation; without contexts the faster encoding without offsets will do.
        encode = (
            tokenizer.backend.encode_batch
            if any(context for context, _ in batch)
            else tokenizer.backend.encode_batch_fast
        )
        for encoding, (context, _) in zip(encode(whole), batch, strict=True):
            yield encoding, context


def _request(encoding: Encoding, context: int, bos: int | None, plain: bool) -> Request:
    """`plain` says that the tokenizer adds no special tokens, so that none have to be looked for."""
    ids = encoding.ids
    start, stop = (0, len(ids)) if plain else _text_bounds(encoding.special_tokens_mask)
    first = _first_after(encoding, context, start, stop) if context else start
    if bos is not None and not start:
        return Request([bos, *ids[:stop]], first + 1)
    return Request(ids if plain else ids[:stop], min(max(first, 1), stop))


def _text_bounds(special: list[int]) -> tuple[int, int]:
    """The range of the tokens that are not special tokens around the text."""
    start, stop = 0, len(special)
    while start < stop and special[start]:
        start += 1
    while stop > start and special[stop - 1]:
        stop -= 1
    return start, stop


def _first_after(encoding: Encoding, context: int, start: int, stop: int) -> int:
    """The first token that reaches beyond the context's last character."""
    token = encoding.char_to_token(context)  # None where no token holds the character, a space for example
    if token is not None:
        return max(start, min(token, stop))
    offsets = encoding.offsets
    return next((index for index in range(start, stop) if offsets[index][1] > context), stop)
