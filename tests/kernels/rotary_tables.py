"""Tables of angles as rotary positions have them."""

import torch
from torch import Tensor

from braidlm.model.attention.positions import RotaryPositions


def rotary_tables(time: int, dim: int, interleaved: bool, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine [time, dim]."""
    config = RotaryPositions.Config(theta=30.0, pairs="interleaved" if interleaved else "half")
    cos, sin = RotaryPositions(config, dim, time).tables(dim, torch.arange(time, device=device)[None])
    return cos[0], sin[0]
