"""Triton where it is installed; elsewhere stand-ins that let kernels be imported, so that lowerings can be asked."""

from typing import Any


class _Absent:
    """Stands for Triton and every name in it; as a decorator it returns the function."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0]


try:
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = _Absent()  # type: ignore[no-redef]
    tl: Any = triton  # type: ignore[no-redef]

HAS_TRITON = not isinstance(triton, _Absent)
