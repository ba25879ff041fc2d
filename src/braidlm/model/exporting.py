"""torch.export records a graph for every length of a text: where it does, parts ask for no size and for no value."""

from typing import TypeVar

import torch
from torch import Tensor

Output = TypeVar("Output")


def is_exporting() -> bool:
    """Whether torch.export (or an ONNX export, which calls it) records the pass."""
    return getattr(torch.compiler, "is_exporting", bool)()  # torch before 2.7 does not say


def is_recorded(values: Tensor) -> bool:
    """Whether an export, torch's compiler or a CUDA graph records the pass: parts then ask for no value."""
    return torch.compiler.is_compiling() or (values.is_cuda and torch.cuda.is_current_stream_capturing())


def exported(kind: type[Output]) -> type[Output]:
    """A dataclass that an exported program returns as the model does."""
    torch.export.register_dataclass(kind)
    return kind
