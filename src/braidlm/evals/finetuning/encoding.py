"""From texts to tokens: one text or two, with the tokenizer's special tokens, truncated to a length.

Special tokens around and between two texts are the tokenizer's; those of `braid prepare`, and GPT-2's, add none. Of two
texts that are too long together the longer is truncated first, as with tokenizers of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor

from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.evals.scoring.requests import BATCH


@dataclass(frozen=True)
class EncodedTexts:
    """Texts as tokens, padded on the right, on the device."""

    ids: Tensor
    """[texts, max length]."""
    lengths: np.ndarray
    """[texts] tokens without padding, at least one."""
    last_positions: Tensor
    """[texts] the position of the last token."""

    def __len__(self) -> int:
        return len(self.lengths)


def encode(
    tokenizer: BraidTokenizer, texts: Sequence[tuple[str, str | None]], max_length: int, device: torch.device
) -> EncodedTexts:
    """All texts, truncated to `max_length` tokens."""
    rows = [ids for at in range(0, len(texts), BATCH) for ids in _rows(tokenizer, texts[at : at + BATCH], max_length)]
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return EncodedTexts(torch.from_numpy(ids).to(device), lengths, torch.from_numpy(lengths - 1).to(device))


def _rows(tokenizer: BraidTokenizer, texts: Sequence[tuple[str, str | None]], max_length: int) -> list[list[int]]:
    backend = tokenizer.backend
    firsts = backend.encode_batch([first for first, _ in texts], add_special_tokens=False)
    seconds: Sequence[Encoding | None] = [None] * len(texts)
    if any(second is not None for _, second in texts):
        seconds = backend.encode_batch([second or "" for _, second in texts], add_special_tokens=False)
    available = max_length - backend.num_special_tokens_to_add(seconds[0] is not None)
    placeholder = [tokenizer.eos_id or 0]  # a text may be empty after normalisation
    rows = []
    for first, second in zip(firsts, seconds, strict=True):
        keep, keep_second = truncated_lengths(len(first), len(second or ()), available)
        first.truncate(keep)
        if second is not None:
            second.truncate(keep_second)
        rows.append(backend.post_process(first, second).ids or placeholder)
    return rows


def truncated_lengths(first: int, second: int, available: int) -> tuple[int, int]:
    """The lengths of two texts after truncation."""
    short, long = sorted((first, second))
    if short + long > available:
        long = max(short, available - short)
    if short + long > available:
        short, long = available // 2, available - available // 2
    return (short, long) if first <= second else (long, short)
