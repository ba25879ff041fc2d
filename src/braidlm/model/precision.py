"""The type in which products are computed."""

import torch
from torch import Tensor


def compute_dtype(values: Tensor) -> torch.dtype:
    """The type of products with these values: autocast's where it is on, or their own."""
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype
