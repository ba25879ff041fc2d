"""From text to requests: which tokens of a text are scored, and what stands before the first.

A text begins as the model's tokenizer begins it. Tokenizers that `braid prepare` trains, and GPT-2's, put nothing
before a text: its first token then has nothing to be predicted from and is not scored. A tokenizer whose
`tokenizer.json` adds a beginning (Llama's `<s>`) does so here too, and then every token is scored. That is what the
BabyLM pipeline of 2025 does with the same folder. `begin="bos"` puts the token of a beginning, or of the end before it,
first in any case, so that every token is scored, as lm-evaluation-harness does. What a tokenizer adds behind a text is
left out: nothing is predicted from it.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from tokenizers import Encoding

from braidlm.core.errors import BraidError
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.scoring.forest import Request

Begin = Literal["tokenizer", "bos"]
AT_ONCE = 10_000
"""Texts that are encoded together; their offsets take memory."""


def requests_for(
    tokenizer: BraidTokenizer, texts: Sequence[tuple[str, str]], begin: Begin = "tokenizer"
) -> list[Request]:
    """A request for each (context, continuation): the tokens of the whole that reach into the continuation are scored.

    The whole is encoded at once, as a model reads it; a continuation brings its own space along.
    """
    start = begin_id(tokenizer) if begin == "bos" else None
    bare = tokenizer.backend.num_special_tokens_to_add(False) == 0
    return [_request(encoding, len(context), start, bare) for encoding, context in _encoded(tokenizer, texts)]


def sentence_requests(tokenizer: BraidTokenizer, sentences: Sequence[str], begin: Begin = "tokenizer") -> list[Request]:
    """Whole texts without a context: the sum over all their tokens (but a first one without a beginning)."""
    return requests_for(tokenizer, [("", sentence) for sentence in sentences], begin)


def begin_id(tokenizer: BraidTokenizer) -> int:
    """What a text that stands alone is predicted from: the token of a beginning, or of the end before it."""
    found = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if found is None:
        raise BraidError("the tokenizer has no token that begins or ends a text", "evaluation")
    return found


def _encoded(tokenizer: BraidTokenizer, texts: Sequence[tuple[str, str]]) -> Iterator[tuple[Encoding, str]]:
    for at in range(0, len(texts), AT_ONCE):
        some = texts[at : at + AT_ONCE]
        whole = [context + continuation for context, continuation in some]
        # Where a continuation begins is found by its characters; without contexts nobody asks for them.
        encode = (
            tokenizer.backend.encode_batch if any(before for before, _ in some) else tokenizer.backend.encode_batch_fast
        )
        for encoding, (context, _) in zip(encode(whole), some, strict=True):
            yield encoding, context


def _request(encoding: Encoding, context: int, start: int | None, bare: bool) -> Request:
    """`bare` says that the tokenizer adds nothing to a text, so that nobody has to look for it."""
    ids = encoding.ids
    begun, stop = (0, len(ids)) if bare else _text_in(encoding.special_tokens_mask)
    first = _reaching(encoding, context, begun, stop) if context else begun
    if start is not None and not begun:
        return Request([start, *ids[:stop]], first + 1)
    return Request(ids if bare else ids[:stop], min(max(first, 1), stop))


def _text_in(special: list[int]) -> tuple[int, int]:
    """From where to where tokens are the text's own."""
    begun, stop = 0, len(special)
    while begun < stop and special[begun]:
        begun += 1
    while stop > begun and special[stop - 1]:
        stop -= 1
    return begun, stop


def _reaching(encoding: Encoding, context: int, begun: int, stop: int) -> int:
    """The first token that reaches behind the context's last character."""
    quick = encoding.char_to_token(context)  # None where no token holds the character, a space for example
    if quick is not None:
        return max(begun, min(quick, stop))
    offsets = encoding.offsets
    return next((at for at in range(begun, stop) if offsets[at][1] > context), stop)
