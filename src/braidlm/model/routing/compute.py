"""Two equal ways to compute what routers chose: sparse (the chosen only) and dense (everything, then weighted by 0).

Which one is faster depends on shapes and device; training measures it once before its first step and says so
(`training/compute.py`). A forward pass never measures, so that it rounds the same in every process.
"""

from typing import Literal

import torch
from torch import Tensor

Compute = Literal["measured", "sparse", "dense"]
MIN_SPARSE_TOKENS = 64
"""Below so many tokens sorting them costs more than it saves: the rule where nothing was measured."""


def is_sparse(compute: Compute, hidden: Tensor) -> bool:
    """Whether only the chosen are computed for a stream [..., width]."""
    if compute != "measured":
        return compute == "sparse"
    if torch.compiler.is_compiling() or (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False  # the number of tokens of an expert would have to be read from the device
    return hidden.numel() // hidden.shape[-1] >= MIN_SPARSE_TOKENS
