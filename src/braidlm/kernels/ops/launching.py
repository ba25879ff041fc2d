"""What a launch needs to know of the device."""

from functools import cache

import torch
from torch import Tensor


@cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; elsewhere (Triton's interpreter) a few, so that loops are gone through."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def programs_for(device: torch.device, per_processor: int, tiles: int) -> int:
    """Enough to fill the device, and none without work."""
    return max(1, min(processors(device) * per_processor, tiles))


def is_nvidia(x: Tensor) -> bool:
    """Whether a kernel may use instructions of NVIDIA's own: not in Triton's interpreter, nor on other GPUs."""
    return x.is_cuda and torch.version.cuda is not None
