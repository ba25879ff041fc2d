"""Triton where it is installed and there is something to run it; elsewhere stand-ins that let kernels be imported, so
that lowerings can be asked. Triton's interpreter runs without a GPU."""

import os
from typing import Any

import torch


class _Absent:
    """Stands for Triton and every name in it; as a decorator it returns the function."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0]


try:
    if not (torch.version.cuda or torch.version.hip or os.environ.get("TRITON_INTERPRET")):
        raise ImportError("this torch knows no GPU")
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = _Absent()  # type: ignore[no-redef]
    tl: Any = triton  # type: ignore[no-redef]

HAS_TRITON = not isinstance(triton, _Absent)
