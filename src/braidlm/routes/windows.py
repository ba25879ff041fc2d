"""Texts in windows that a model can read, several of similar length at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Parts of texts that are read together."""

    texts: list[int]
    """For each window the index of its text."""
    starts: list[int]
    """For each window the position in its text at which it begins."""
    rows: list[Sequence[int]]
    """Their token ids."""

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token ids [window, time], padded on the right, and the mask that is 0 there."""
        length = max(map(len, self.rows))
        ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in self.rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in self.rows], device=device)
        return ids, mask

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


def windows_of(texts: Sequence[Sequence[int]], size: int, batch: int) -> Iterator[Windows]:
    """All texts in windows of at most `size` tokens, `batch` of them at once.

    Windows of similar length come together, so that there is little padding; it is never counted.
    """
    order = [(number, at) for number, text in enumerate(texts) for at in range(0, len(text), size)]
    order.sort(key=lambda window: min(size, len(texts[window[0]]) - window[1]))
    for begin in range(0, len(order), batch):
        part = order[begin : begin + batch]
        rows = [texts[number][at : at + size] for number, at in part]
        yield Windows([number for number, _ in part], [at for _, at in part], rows)
