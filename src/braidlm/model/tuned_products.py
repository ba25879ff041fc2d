"""Products of bf16 matrices by the fastest of cuBLASLt's algorithms, found by trying them once for each shape.

torch takes the first that cuBLAS guesses, which for the long, narrow products of small models is up to a sixth slower.
Where the library is not found, or anything else is unusual, torch's own product serves; it is the reference.
"""

import contextlib
import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

CANDIDATES, TRIALS = 16, 5
WORTH = 1 << 30
"""Multiplications of a product for which trying pays."""

BF16, FLOAT32, COMPUTE_FLOAT32 = 14, 0, 68
TRANSPOSE_A, MOST_WORKSPACE = 3, 1
"""The library's numbers for types and for attributes of a product and of a preference."""


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@cache
def _library() -> Any:
    """The library that torch itself has loaded."""
    for version in (torch.version.cuda or "").split(".")[:1]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(f"libcublasLt.so.{version}")
    return None


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered {status}")


class _Product:
    """One shape. The library stores matrices by columns, so to it all of ours are transposed and in reverse order."""

    def __init__(self, rows: int, inner: int, columns: int, transposed: bool, device: int):
        library, self.handle = _library(), _handle(device)
        self.description = c_void_p()
        _check(library.cublasLtMatmulDescCreate(byref(self.description), c_int(COMPUTE_FLOAT32), c_int(FLOAT32)))
        flag = c_int32(transposed)
        _check(library.cublasLtMatmulDescSetAttribute(self.description, c_int(TRANSPOSE_A), byref(flag), c_size_t(4)))
        self.b = _layout(inner, columns) if transposed else _layout(columns, inner)
        self.a, self.out = _layout(inner, rows), _layout(columns, rows)
        self.candidates = self._candidates()
        self.chosen = 0

    def _candidates(self) -> list[_Heuristic]:
        library, preference, none = _library(), c_void_p(), c_size_t(0)
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
        _check(
            library.cublasLtMatmulPreferenceSetAttribute(preference, c_int(MOST_WORKSPACE), byref(none), c_size_t(8))
        )
        found, count = (_Heuristic * CANDIDATES)(), c_int()
        layouts = (self.b, self.a, self.out, self.out)
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.description, *layouts, preference, c_int(CANDIDATES), found, byref(count)
        )
        _check(library.cublasLtMatmulPreferenceDestroy(preference))
        return [] if status else list(found[: count.value])

    def run(self, a: Tensor, b: Tensor, out: Tensor, which: int) -> None:
        one, zero = c_float(1.0), c_float(0.0)
        stream = torch.cuda.current_stream(a.device).cuda_stream
        _check(
            _library().cublasLtMatmul(
                self.handle, self.description, byref(one), c_void_p(b.data_ptr()), self.b, c_void_p(a.data_ptr()),
                self.a, byref(zero), c_void_p(out.data_ptr()), self.out, c_void_p(out.data_ptr()), self.out,
                byref(self.candidates[which].algorithm), c_void_p(None), c_size_t(0), c_void_p(stream),
            )
        )  # fmt: skip

    def choose(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        times = []
        for which in range(len(self.candidates)):
            best = float("inf")
            for _ in range(TRIALS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                self.run(a, b, out, which)
                end.record()
                end.synchronize()
                best = min(best, begin.elapsed_time(end))
            times.append(best)
        self.chosen = times.index(min(times))


def _layout(rows: int, columns: int) -> c_void_p:
    made = c_void_p()
    size = (c_uint64(rows), c_uint64(columns), c_int64(rows))
    _check(_library().cublasLtMatrixLayoutCreate(byref(made), c_int(BF16), *size))
    return made


_products: dict[tuple[int, int, int, bool, int], _Product] = {}
"""What was found for each shape. Fast paths only: results do not depend on it beyond rounding."""


def tuned_product(a: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
    """a [rows, inner] @ b [inner, columns], or, transposed, b [columns, inner]."""
    rows, inner = a.shape
    columns = b.shape[0] if transposed else b.shape[1]
    if not _served(a, b) or rows * inner * columns < WORTH:
        return a @ (b.t() if transposed else b)
    out = a.new_empty(rows, columns)
    key = (rows, inner, columns, transposed, a.device.index)
    if key not in _products:
        if torch.cuda.is_current_stream_capturing():
            return a @ (b.t() if transposed else b)
        _products[key] = _Product(*key)
        if _products[key].candidates:
            _products[key].choose(a, b, out)
    if not _products[key].candidates:
        return a @ (b.t() if transposed else b)
    _products[key].run(a, b, out, _products[key].chosen)
    return out


def _served(a: Tensor, b: Tensor) -> bool:
    if not (a.is_cuda and a.dtype == b.dtype == torch.bfloat16) or torch.version.cuda is None:
        return False
    plain = all(x.is_contiguous() and x.data_ptr() % 256 == 0 for x in (a, b))  # as the library assumes
    return plain and _library() is not None
