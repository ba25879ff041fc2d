"""The precision of a step: bf16 autocast where the hardware is fast at it, float32 elsewhere."""

import contextlib
from contextlib import AbstractContextManager

import torch

from braidlm.core.console import say


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The type of matrix products; a CPU that is slow at bf16 gets float32 and a message."""
    if precision == "float32":
        return torch.float32
    if precision == "pure_bf16":
        return torch.bfloat16
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        if precision == "bf16":
            say("This GPU has no bf16: computing in float32.")
        return torch.float32
    if precision == "bf16":
        if cpu_is_fast_at_bf16():
            return torch.bfloat16
        say("This CPU is slow at bf16 (about 100 times): computing in float32.")
    return torch.float32


def cpu_is_fast_at_bf16() -> bool:
    """Whether the CPU has matrix instructions for bf16."""
    check = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(check is not None and torch.backends.mkldnn.is_available() and check())


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Autocast to `dtype`, or nothing for float32. Weights are cast again in each pass, as graph capture requires."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)
