"""From texts to tokens: as the model's tokenizer writes one text or two, cut to a length.

What a tokenizer puts around two texts and between them is its own affair; those of `braid prepare`, and GPT-2's, put
nothing there. Of two that are too long together the longer loses its end first, as with tokenizers of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor

from braidlm.data.tokenizing.tokenizer import BraidTokenizer

AT_ONCE = 10_000
"""Texts that are encoded together; their offsets take memory."""


@dataclass(frozen=True)
class Encoded:
    """Texts as tokens, filled up behind their ends, on the device."""

    ids: Tensor
    """[texts, longest]."""
    lengths: np.ndarray
    """[texts] real tokens, at least one of each."""
    lasts: Tensor
    """[texts] where the last real token stands."""

    def __len__(self) -> int:
        return len(self.lengths)


def encode(
    tokenizer: BraidTokenizer, texts: Sequence[tuple[str, str | None]], most: int, device: torch.device
) -> Encoded:
    """All texts, none longer than `most` tokens."""
    rows = [ids for at in range(0, len(texts), AT_ONCE) for ids in _rows(tokenizer, texts[at : at + AT_ONCE], most)]
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return Encoded(torch.from_numpy(ids).to(device), lengths, torch.from_numpy(lengths - 1).to(device))


def _rows(tokenizer: BraidTokenizer, texts: Sequence[tuple[str, str | None]], most: int) -> list[list[int]]:
    backend = tokenizer.backend
    firsts = backend.encode_batch([first for first, _ in texts], add_special_tokens=False)
    seconds: Sequence[Encoding | None] = [None] * len(texts)
    if any(second is not None for _, second in texts):
        seconds = backend.encode_batch([second or "" for _, second in texts], add_special_tokens=False)
    room = most - backend.num_special_tokens_to_add(seconds[0] is not None)
    filler = [tokenizer.eos_id or 0]  # a text may vanish in normalisation, and something has to be read
    rows = []
    for first, second in zip(firsts, seconds, strict=True):
        keep, keep_second = fitted(len(first), len(second or ()), room)
        first.truncate(keep)
        if second is not None:
            second.truncate(keep_second)
        rows.append(backend.post_process(first, second).ids or filler)
    return rows


def fitted(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two texts stays."""
    short, long = sorted((first, second))
    if short + long > room:
        long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)
