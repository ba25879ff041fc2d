"""How many programs a kernel that loops over rows should have."""

from functools import cache

import torch


@cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; elsewhere (Triton's interpreter) a few, so that loops are gone through."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def programs_for(device: torch.device, per_processor: int, tiles: int) -> int:
    """Enough to fill the device, and none without work."""
    return max(1, min(processors(device) * per_processor, tiles))
