"""Dropout inside kernels: whether a number is kept follows from a seed and its slot, forward and backward alike."""

from torch import Tensor

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS, WARPS = 2048, 4


@triton.jit
def kept(seed, offsets, THRESHOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which numbers at these places are left; `seed` is on the device, so that a replayed graph sees a new one.

    A hash of seed and offsets (MurmurHash3's last steps) decides: a whole random generator for each number would take
    longer than what is dropped.
    """
    x = offsets.to(tl.uint32) * 0x9E3779B1 + tl.load(seed).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)) >= THRESHOLD


@triton.jit
def apply_dropout(x, seed, offsets, keep_scale, THRESHOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers at these places after dropout, if there is any."""
    if THRESHOLD:
        x = tl.where(kept(seed, offsets, THRESHOLD), x * keep_scale, 0.0)
    return x


@triton.jit
def _drop(x, seed, made, size, keep_scale, THRESHOLD: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = offsets < size
    y = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    y = apply_dropout(y, seed, offsets, keep_scale, THRESHOLD)
    tl.store(made + offsets, y.to(made.dtype.element_ty), mask=inside)


def threshold(dropout: float) -> int:
    """Of 32 random bits, what is below is dropped."""
    return int(dropout * 2**32)


def dropped(x: Tensor, dropout: float, seed: Tensor, made: Tensor) -> Tensor:
    """Dropout as the kernels that share the seed do it at these slots, into `made`."""
    grid = (triton.cdiv(x.numel(), NUMBERS),)
    _drop[grid](x, seed, made, x.numel(), 1 / (1 - dropout), threshold(dropout), NUMBERS, num_warps=WARPS)
    return made
