"""From texts to tokens: one text or two, with the tokenizer's special tokens, truncated to a length.

Special tokens around and between two texts are the tokenizer's; those of `braid prepare`, and GPT-2's, add none. Of two
texts that are too long together the longer is truncated first, as with tokenizers of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
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
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    backend.enable_truncation(max_length)
    placeholder = [tokenizer.eos_id or 0]  # a text may be empty after normalisation
    inputs = [first if second is None else (first, second) for first, second in texts]
    rows = [
        encoding.ids or placeholder
        for start in range(0, len(inputs), BATCH)
        for encoding in backend.encode_batch_fast(inputs[start : start + BATCH])
    ]
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return EncodedTexts(torch.from_numpy(ids).to(device), lengths, torch.from_numpy(lengths - 1).to(device))
