"""A key-value cache of fixed size, for our own decoding loop."""

import torch
from torch import Tensor


class FixedCache:
    """Storage for every layer, [batch, head, length, dim], filled from the front.

    Eagerly it returns the filled part as a view. For graph replay (`replaying`), where a Python number would be fixed
    in the graph, the write position is a tensor, the whole storage is returned, and the mask hides the rest.
    """

    def __init__(
        self, shapes: list[tuple[int, int]], batch: int, length: int, device: torch.device, dtype: torch.dtype
    ):
        self.keys = [torch.zeros(batch, heads, length, dim, device=device, dtype=dtype) for heads, dim in shapes]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.length = length
        self.filled = 0
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.replaying = False

    def get_seq_length(self) -> int:
        return self.filled

    def update(self, key: Tensor, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[slot], self.values[slot]
        if self.replaying:
            keys.index_copy_(2, self.position, key)
            values.index_copy_(2, self.position, value)
            return keys, values
        end = self.filled + key.shape[2]
        keys[:, :, self.filled : end] = key
        values[:, :, self.filled : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count tokens whose keys and values every layer has stored."""
        self.filled += tokens
        self.position += tokens
