"""Numbers for the device that hardly ever change, such as where parameters are: sent there once."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=128)  # a copy from the host would be refused while a step is recorded
def addresses(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
