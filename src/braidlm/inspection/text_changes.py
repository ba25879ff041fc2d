"""How the prediction of one text changes: with parts of a model switched off, or with another model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from braidlm.core.decoding.generation import token_texts
from braidlm.core.errors import BraidError
from braidlm.core.tokenizer import Tokenizer

ROWS = 64
"""Tokens whose distributions are compared at once."""
MAX_NUMBERS = 1 << 26
"""Tokens times vocabulary whose probabilities are in memory at once: 256 MB, twice."""


@dataclass(frozen=True)
class TokenChange:
    """One token of the text; None where nothing precedes the token that could predict it."""

    before: float | None
    """The probability of the token."""
    after: float | None
    rank_before: int | None
    """1 where no other token was more probable."""
    rank_after: int | None
    divergence: float | None
    """The Jensen-Shannon divergence of the two distributions that the token was drawn from, in bits: 0 to 1."""


@dataclass(frozen=True)
class TextChange:
    tokens: list[TokenChange]
    bits_before: float | None
    """Bits per byte of the text, without its first token if nothing precedes it; None where nothing is predicted."""
    bits_after: float | None


def check_size(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a text whose predictions would take too much memory."""
    if len(ids) * vocab_size > MAX_NUMBERS:
        most = MAX_NUMBERS // vocab_size
        what = f"the text has {len(ids):,} tokens; with this vocabulary at most {most:,} are compared"
        raise BraidError(what, todo="Give a shorter text.")


@torch.no_grad()
def predict(model: Any, ids: Sequence[int]) -> Tensor:
    """The log-probabilities [token, vocabulary] of what follows each token but the last, on the CPU."""
    if len(ids) < 2:
        return torch.zeros(0, 1)
    tokens = torch.tensor([list(ids)], device=model.device)
    return model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1).cpu()


def text_change(before_TV: Tensor, after_TV: Tensor, ids: Sequence[int], tokenizer: Tokenizer) -> TextChange:
    """Compare two predictions of the same tokens, which may have different numbers of unused rows at the end."""
    size = max(before_TV.shape[-1], after_TV.shape[-1])
    changes = [TokenChange(None, None, None, None, None)]
    bits = [0.0, 0.0]
    targets = torch.tensor(list(ids[1:]), dtype=torch.long)
    parts = (both.split(ROWS) for both in (before_TV, after_TV, targets))
    for before, after, wanted in zip(*parts, strict=True):
        sides = [pad(side, (0, size - side.shape[-1]), value=-torch.inf) for side in (before, after)]
        actual = [side.gather(-1, wanted[:, None]) for side in sides]
        ranks = [1 + (side > own).sum(-1) for side, own in zip(sides, actual, strict=True)]
        bits = [sum_ - float(own.double().sum()) / math.log(2) for sum_, own in zip(bits, actual, strict=True)]
        columns = (*(own[:, 0].exp() for own in actual), *ranks, divergence(*sides))
        changes += [TokenChange(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    size_in_bytes = len("".join(token_texts(tokenizer, ids)[1:]).encode())
    per_byte = [total / size_in_bytes if size_in_bytes and len(ids) > 1 else None for total in bits]
    return TextChange(changes[: len(ids)], *per_byte)


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of log-probabilities [..., vocabulary], in bits."""
    middle = torch.logaddexp(one, other) - math.log(2)
    halves = [torch.where(side > -torch.inf, side.exp() * (side - middle), 0.0).sum(-1) for side in (one, other)]
    return ((halves[0] + halves[1]) / (2 * math.log(2))).clamp(0.0, 1.0)
