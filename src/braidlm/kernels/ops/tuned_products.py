"""Products of bf16 matrices by the fastest of cuBLASLt's algorithms, timed once for each shape.

torch takes the first that cuBLAS's heuristic proposes, which for the long, narrow products of small models is up to a
sixth slower. torch's own product is the reference, and the fallback where the library is missing or the inputs are not
supported.
"""

import contextlib
import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

CANDIDATES, TRIALS, REPEATS = 8, 5, 10
"""Algorithms that are timed, trials of each, and products in a trial."""
SLEEP_CYCLES = 2_000_000
"""Device cycles in which the host can launch all products of a trial, so that the device does not wait for it."""
MIN_MULTIPLICATIONS = 1 << 30
"""The size of a product from which on tuning pays."""

BF16, FLOAT32, COMPUTE_FLOAT32 = 14, 0, 68
TRANSPOSE_A, EPILOGUE, BIAS_ADDRESS, MAX_WORKSPACE = 3, 7, 8, 1
ADD_BIAS = 4
"""cuBLASLt's constants for types, for attributes of a product and of a preference, and for epilogues."""


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
    with contextlib.suppress(OSError):
        return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
    return None


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")


class _Product:
    """One shape. cuBLASLt's matrices are column-major, so ours are passed as transposed and in reverse order."""

    def __init__(self, rows: int, inner: int, columns: int, transposed: bool, biased: bool, device: int):
        library, self.handle = _library(), _handle(device)
        self.description = c_void_p()
        _check(library.cublasLtMatmulDescCreate(byref(self.description), c_int(COMPUTE_FLOAT32), c_int(FLOAT32)))
        self._set(TRANSPOSE_A, c_int32(transposed))
        if biased:
            self._set(EPILOGUE, c_int32(ADD_BIAS))
        self.b = _layout(inner, columns) if transposed else _layout(columns, inner)
        self.a, self.out = _layout(inner, rows), _layout(columns, rows)
        self.candidates = self._candidates()
        self.fastest = 0

    def _set(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check(_library().cublasLtMatmulDescSetAttribute(self.description, c_int(attribute), byref(value), size))

    def _candidates(self) -> list[_Heuristic]:
        library, preference, none = _library(), c_void_p(), c_size_t(0)
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
        _check(library.cublasLtMatmulPreferenceSetAttribute(preference, c_int(MAX_WORKSPACE), byref(none), c_size_t(8)))
        heuristics, count = (_Heuristic * CANDIDATES)(), c_int()
        layouts = (self.b, self.a, self.out, self.out)
        status = library.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.description, *layouts, preference, c_int(CANDIDATES), heuristics, byref(count)
        )
        _check(library.cublasLtMatmulPreferenceDestroy(preference))
        return [] if status else list(heuristics[: count.value])

    def run(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, index: int) -> None:
        if bias is not None:
            self._set(BIAS_ADDRESS, c_void_p(bias.data_ptr()))
        one, zero = c_float(1.0), c_float(0.0)
        stream = torch.cuda.current_stream(a.device).cuda_stream
        _check(
            _library().cublasLtMatmul(
                self.handle, self.description, byref(one), c_void_p(b.data_ptr()), self.b, c_void_p(a.data_ptr()),
                self.a, byref(zero), c_void_p(out.data_ptr()), self.out, c_void_p(out.data_ptr()), self.out,
                byref(self.candidates[index].algorithm), c_void_p(None), c_size_t(0), c_void_p(stream),
            )
        )  # fmt: skip

    def select_fastest(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        indices = range(len(self.candidates))
        times = [[self._time(a, b, bias, out, index) for index in indices] for _ in range(TRIALS)]
        best = [min(trials) for trials in zip(*times, strict=True)]
        self.fastest = best.index(min(best)) if best else 0

    def _time(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, index: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        for _ in range(REPEATS):
            self.run(a, b, bias, out, index)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def _layout(rows: int, columns: int) -> c_void_p:
    created = c_void_p()
    size = (c_uint64(rows), c_uint64(columns), c_int64(rows))
    _check(_library().cublasLtMatrixLayoutCreate(byref(created), c_int(BF16), *size))
    return created


_products: dict[tuple[int, int, int, bool, bool, int], _Product] = {}
"""The tuned products by shape; results do not depend on them beyond rounding."""


def tuned_product(a: Tensor, b: Tensor, transposed: bool = False, bias: Tensor | None = None) -> Tensor:
    """a [rows, inner] @ b [inner, columns] (transposed: b [columns, inner]), with a bias [columns] if there is one."""
    (rows, inner), columns = a.shape, b.shape[0] if transposed else b.shape[1]
    key = (rows, inner, columns, transposed, bias is not None, a.get_device())
    tuned = _products.get(key)
    is_large = rows * inner * columns >= MIN_MULTIPLICATIONS and _is_supported(a, b, bias)
    if tuned is None and is_large and not torch.cuda.is_current_stream_capturing():
        tuned = _products[key] = _Product(*key)
        tuned.select_fastest(a, b, bias, a.new_empty(rows, columns))
    if tuned is None or not tuned.candidates or not is_large:
        stored = b.t() if transposed else b
        return a @ stored if bias is None else torch.addmm(bias, a, stored)
    out = a.new_empty(rows, columns)
    tuned.run(a, b, bias, out, tuned.fastest)
    return out


def _is_supported(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    if not a.is_cuda or torch.version.cuda is None:
        return False
    tensors = [x for x in (a, b, bias) if x is not None]
    supported = all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in tensors)
    # The heuristic assumes matrices that are aligned to 256 bytes, as torch's allocations are.
    return supported and all(x.data_ptr() % 256 == 0 for x in (a, b)) and _library() is not None
