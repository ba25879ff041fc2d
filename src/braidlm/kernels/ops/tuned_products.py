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

CANDIDATES, TRIALS, REPEATS = 8, 5, 10
"""Algorithms that are tried, config often, and config often one after another each time."""
AHEAD = 2_000_000
"""Cycles of the device in which the host can ask for all repeats of a trial, so that these do not wait for it."""
WORTH = 1 << 30
"""Multiplications of a product for which trying pays."""

BF16, FLOAT32, COMPUTE_FLOAT32 = 14, 0, 68
TRANSPOSE_A, EPILOGUE, BIAS_ADDRESS, MOST_WORKSPACE = 3, 7, 8, 1
ADD_BIAS = 4
"""The library's numbers for types, for attributes of a product and of a preference, and for what follows a product."""


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
        self.chosen = 0

    def _set(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check(_library().cublasLtMatmulDescSetAttribute(self.description, c_int(attribute), byref(value), size))

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

    def run(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, which: int) -> None:
        if bias is not None:
            self._set(BIAS_ADDRESS, c_void_p(bias.data_ptr()))
        one, zero = c_float(1.0), c_float(0.0)
        stream = torch.cuda.current_stream(a.device).cuda_stream
        _check(
            _library().cublasLtMatmul(
                self.handle, self.description, byref(one), c_void_p(b.data_ptr()), self.b, c_void_p(a.data_ptr()),
                self.a, byref(zero), c_void_p(out.data_ptr()), self.out, c_void_p(out.data_ptr()), self.out,
                byref(self.candidates[which].algorithm), c_void_p(None), c_size_t(0), c_void_p(stream),
            )
        )  # fmt: skip

    def choose(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        every = range(len(self.candidates))
        times = [[self._time(a, b, bias, out, which) for which in every] for _ in range(TRIALS)]
        best = [min(of_one) for of_one in zip(*times, strict=True)]
        self.chosen = best.index(min(best))

    def _time(self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, which: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        begin.record()
        for _ in range(REPEATS):
            self.run(a, b, bias, out, which)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def _layout(rows: int, columns: int) -> c_void_p:
    made = c_void_p()
    size = (c_uint64(rows), c_uint64(columns), c_int64(rows))
    _check(_library().cublasLtMatrixLayoutCreate(byref(made), c_int(BF16), *size))
    return made


_products: dict[tuple[int, int, int, bool, bool, int], _Product] = {}
"""What was found for each shape. Fast paths only: results do not depend on it beyond rounding."""


def tuned_product(a: Tensor, b: Tensor, transposed: bool = False, bias: Tensor | None = None) -> Tensor:
    """a [rows, inner] @ b [inner, columns] (transposed: b [columns, inner]), with a bias [columns] if there is one."""
    (rows, inner), columns = a.shape, b.shape[0] if transposed else b.shape[1]
    key = (rows, inner, columns, transposed, bias is not None, a.get_device())
    tuned = _products.get(key)
    worth = rows * inner * columns >= WORTH and _served(a, b, bias)
    if tuned is None and worth and not torch.cuda.is_current_stream_capturing():
        tuned = _products[key] = _tuned(key, a, b, bias)
    if tuned is None or not tuned.candidates or not worth:
        stored = b.t() if transposed else b
        return a @ stored if bias is None else torch.addmm(bias, a, stored)
    out = a.new_empty(rows, columns)
    tuned.run(a, b, bias, out, tuned.chosen)
    return out


def _tuned(key: tuple[int, int, int, bool, bool, int], a: Tensor, b: Tensor, bias: Tensor | None) -> _Product:
    made = _Product(*key)
    if made.candidates:
        made.choose(a, b, bias, a.new_empty(key[0], key[2]))
    return made


def _served(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    if not a.is_cuda or torch.version.cuda is None:
        return False
    given = [x for x in (a, b, bias) if x is not None]
    usual = all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in given)
    # The library takes matrices to begin at such addresses; torch's allocations do.
    return usual and all(x.data_ptr() % 256 == 0 for x in (a, b)) and _library() is not None
