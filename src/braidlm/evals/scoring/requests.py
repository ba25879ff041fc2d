"""From text to requests: which tokens of a text are scored, and what precedes the first of them.

A text begins as the model's tokenizer begins it. Tokenizers that `braid prepare` trains, and GPT-2's, add nothing
before a text: its first token has no context to be predicted from and is not scored. Where `tokenizer.json` adds a BOS
token (Llama's `<s>`), it is added here too, and every token is scored. The BabyLM pipeline of 2025 does the same with
the same folder. `begin="bos"` always puts the BOS (or else the EOS) token first, so that every token is scored, as in
lm-evaluation-harness. Special tokens that a tokenizer adds after a text are dropped: nothing is predicted from them.

A request that is longer than the model's context is truncated at the beginning, where nothing is scored. Where that is
not enough, because the scored tokens alone exceed the context, it is scored in windows of the context's length: the
first window reaches as far as all of the context before it fits, or half a context into the scored tokens, and each
further one scores the next half a context. So a token in a later window is given half a context or more, and the sum
over all windows is the log-probability of the whole by the chain rule.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from tokenizers import Encoding

from braidlm.core.errors import BraidError
from braidlm.core.tokenizer import pause_tokens
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
    `pauses` pause tokens stand between the two. Of a text without a context all tokens are scored, but a first one that
    has no BOS token before it.
    """
    waiting = pause_tokens(tokenizer, pauses)
    bos = begin_id(tokenizer) if begin == "bos" else None
    plain = tokenizer.backend.num_special_tokens_to_add(False) == 0
    requests = []
    for at in range(0, len(texts), BATCH):
        batch = texts[at : at + BATCH]
        # Character offsets locate the continuation; without contexts the faster encoding without offsets will do.
        has_contexts = any(context for context, _ in batch)
        encode = tokenizer.backend.encode_batch if has_contexts else tokenizer.backend.encode_batch_fast
        encodings = encode([context + continuation for context, continuation in batch])
        for encoding, (context, _) in zip(encodings, batch, strict=True):
            ids = encoding.ids
            start, stop = 0, len(ids)
            if not plain:  # special tokens stand around the text
                inside = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
                start, stop = (inside[0], inside[-1] + 1) if inside else (stop, stop)
                ids = ids[:stop]
            first = _first_after(encoding, len(context), start, stop) if context else start
            if bos is not None and not start:
                ids, first = [bos, *ids], first + 1
            else:
                first = min(max(first, 1), stop)
            if context and waiting:
                ids, first = [*ids[:first], *waiting, *ids[first:]], first + len(waiting)
            requests.append(Request(ids, first))
    return requests


def begin_id(tokenizer: BraidTokenizer) -> int:
    """The token that the first token of a text is predicted from: BOS, or else EOS."""
    token = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if token is None:
        raise BraidError("the tokenizer has no token that begins or ends a text", "evaluation")
    return token


def consecutive_ranges(sizes: Sequence[int]) -> list[range]:
    """The index ranges of consecutive groups of these sizes."""
    return [range(end - size, end) for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True)]


def strip_final_specials(encoding: Encoding, keep: int = 0) -> list[int]:
    """The ids without the special tokens at the end; at least the first `keep` ids stay."""
    ids, special = encoding.ids, encoding.special_tokens_mask
    stop = len(ids)
    while stop > keep and special[stop - 1]:
        stop -= 1
    return ids[:stop]


def _first_after(encoding: Encoding, context: int, start: int, stop: int) -> int:
    """The first token that reaches beyond the context's last character."""
    token = encoding.char_to_token(context)  # None where no token holds the character, a space for example
    if token is not None:
        return max(start, min(token, stop))
    offsets = encoding.offsets
    return next((index for index in range(start, stop) if offsets[index][1] > context), stop)


def from_divergence(requests: Sequence[Request], groups: Sequence[Sequence[int]]) -> list[Request]:
    """The requests of each group (of indices), scored from the first token in which they are not all equal.

    A common prefix adds the same to all sums, so that the head need not be applied there. This holds for options that
    are scored from the same token on; others stay as they are.
    """
    diverging = [each if each.first <= len(each.ids) else Request(each.ids, len(each.ids)) for each in requests]
    for group in groups:
        ids, first = diverging[group[0]]
        prefix, common = ids[:first], len(ids)
        for index in group[1:]:
            other = diverging[index]
            if other.first != first or other.ids[:first] != prefix:
                break
            shorter = min(common, len(other.ids))
            common = next((at for at in range(first, shorter) if ids[at] != other.ids[at]), shorter)
        else:
            for index in group if common > first else ():
                diverging[index] = Request(diverging[index].ids, min(common, len(diverging[index].ids)))
    return diverging


def truncate_alike(requests: Sequence[Request], groups: Sequence[Sequence[int]], context: int | None) -> list[Request]:
    """Requests within a model's context: where one of a group is too long, all of the group lose as many tokens at the
    beginning, so that all options are scored after the same context (and share it)."""
    truncated = list(requests)
    if context is None:
        return truncated
    for group in groups:
        excess = max(len(requests[index].ids) for index in group) - 1 - context
        if 0 < excess < min(requests[index].first for index in group):
            for index in group:
                truncated[index] = Request(requests[index].ids[excess:], requests[index].first - excess)
    return truncated


SHORTENED, IN_WINDOWS = "shortened", "in windows"
"""Keys of a result's notes."""


def windows_of(request: Request, context: int) -> list[Request]:
    """The requests, one or several, that score the same tokens in order and fit into the context."""
    ids, first = request
    excess = len(ids) - 1 - context
    if excess <= 0:
        return [request]
    if excess < first:
        return [Request(ids[excess:], first - excess)]
    half = max(1, context // 2)
    windows = []
    end = max(context + 1, first + half)
    while first < len(ids):
        end = min(end, len(ids))
        begin = end - 1 - context
        windows.append(Request(ids[begin:end], first - begin))
        first, end = end, end + half
    return windows


def sliding_windows(tokens: Sequence[int], before: int, window: int) -> list[Request]:
    """A long text of which `window` tokens are read at once: every token is predicted exactly once.

    These are the windows of lm-evaluation-harness (`get_rolling_token_windows` with one token of context): the first
    begins with the token `before`, each further one with the last token before it, and the last is moved back to be a
    full one.
    """
    windows = [Request([before, *tokens[:window]])] if tokens else []
    for start in range(window, len(tokens), window):
        end = min(start + window, len(tokens))
        ids = tokens[end - window - 1 : end]
        windows.append(Request(ids, len(ids) - (end - start)))
    return windows


def too_long(
    requests: Sequence[Request], context: int | None, items: Sequence[Sequence[int]] | None = None
) -> dict[str, int]:
    """How many items (groups of requests; else each is one) had a text truncated, and how many one in windows."""
    long = [] if context is None else [at for at, request in enumerate(requests) if len(request.ids) > context + 1]
    in_windows = {at for at in long if len(requests[at].ids) - 1 - (context or 0) >= requests[at].first}
    shortened = set(long) - in_windows
    if items is not None and long:
        owner = {at: index for index, item in enumerate(items) for at in item}
        shortened, in_windows = ({owner[at] for at in some} for some in (shortened, in_windows))
    return {SHORTENED: len(shortened), IN_WINDOWS: len(in_windows)}


def truncate_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    starts = [start for start in map(text.find, stops) if start >= 0]
    return text[: min(starts)] if starts else text


def contains_any(text: str, stops: Sequence[str]) -> bool:
    """Whether one of the stop strings is in the text."""
    return any(stop in text for stop in stops)
