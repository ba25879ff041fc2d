"""A file that `torch.save` wrote, opened without running anything that is in it."""

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from braidlm.core.errors import BraidError

USUAL_KEYS = ("model_state_dict", "state_dict", "model")
"""Where training scripts put a model's tensors beside other things."""


def load_state(path: Path) -> dict[str, Tensor]:
    """The state dict in a file: all of it, or what lies there under a key beside, say, an optimizer's state."""
    data = _load(path)
    if _is_state(data):
        return dict(data)
    inside = {key: value for key, value in data.items() if _is_state(value)} if isinstance(data, dict) else {}
    key = next((key for key in USUAL_KEYS if key in inside), next(iter(inside)) if len(inside) == 1 else None)
    if key is None:
        raise BraidError(
            f"which tensors are the model's is not clear in this file: it holds {_described(data)}",
            str(path),
            f"Save the model's state dict alone, or under '{USUAL_KEYS[0]}'.",
        )
    return dict(inside[key])


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"objects other than tensors ({found[1]})" if found else "what torch cannot open safely"
        raise BraidError(
            f"this pickle holds {what}, which may run any code when opened; Braid does not open it",
            str(path),
            "If you trust it, save its state dict alone: python -c \"import torch; s = torch.load('FILE', "
            f"weights_only=False); torch.save(s['{USUAL_KEYS[0]}'], 'NEW_FILE')\"",
        ) from error
    except Exception as error:  # torch raises errors of many kinds for files it cannot make sense of
        first = " ".join(str(error).split()).split(". ")[0]
        why = f"{type(error).__name__}: {first}" if first else type(error).__name__
        raise BraidError(
            f"this file is damaged, or torch.save did not write it ({why})", str(path), "Download or copy it again."
        ) from error


def _is_state(data: Any) -> bool:
    return (
        isinstance(data, dict)
        and bool(data)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in data.items())
    )


def _described(data: Any) -> str:
    if not isinstance(data, dict):
        return f"one {type(data).__name__}"
    return ", ".join(f"'{key}' ({type(value).__name__})" for key, value in list(data.items())[:12]) or "nothing"
