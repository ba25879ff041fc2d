"""The device a model runs on."""

import os
import platform

import torch

from braidlm.core.errors import BraidError


def choose_device(name: str) -> str:
    """The device of this name, checked; `auto` is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device it was built without
        reason = str(error).strip().split("\n")[0]
        why = (
            "" if reason.startswith("Expected one of") else f" ({reason})"
        )  # torch's list of every device there could be
        todo = "Use auto, cpu or cuda." if torch.cuda.is_available() else "Use auto or cpu."
        raise BraidError(f"there is no device '{name}' here{why}", todo=todo) from None
    return name


def device_name(device: torch.device) -> str:
    """The hardware's name, as results give it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"
