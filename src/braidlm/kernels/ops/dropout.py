"""Dropout inside kernels: the keep mask is a hash of seed and offset, so that the backward pass computes it again."""

from dataclasses import dataclass

from torch import Tensor

from braidlm.kernels.optional_triton import tl, triton

ELEMENTS, WARPS = 2048, 4


@dataclass(frozen=True)
class DropoutUse:
    """One use of dropout in a pass: how often it drops, and the seed of its keep mask, on the device."""

    probability: float = 0.0
    seed: Tensor | None = None

    @property
    def keep_scale(self) -> float:
        return 1 / (1 - self.probability)

    @property
    def threshold(self) -> int:
        """Elements whose 32 random bits are below this are dropped."""
        return int(self.probability * 2**32)


NO_DROPOUT = DropoutUse()


@triton.jit
def apply_dropout(x, seed, offsets, keep_scale, THRESHOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements at these offsets after dropout; with a threshold of 0 they are unchanged.

    `seed` is on the device, so that a replayed graph reads a new one. The keep mask hashes with MurmurHash3's last
    steps: a random generator for each element would take longer than the kernel.
    """
    if THRESHOLD:
        bits = offsets.to(tl.uint32) * 0x9E3779B1 + tl.load(seed).to(tl.uint32)
        bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
        bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
        x = tl.where((bits ^ (bits >> 16)) >= THRESHOLD, x * keep_scale, 0.0)
    return x


@triton.jit
def _dropout(x, seed, out, size, keep_scale, THRESHOLD: tl.constexpr, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offsets < size
    y = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    y = apply_dropout(y, seed, offsets, keep_scale, THRESHOLD)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask)


def dropout_into(x: Tensor, dropout: DropoutUse, out: Tensor) -> Tensor:
    """Dropout of `x` into `out`, with the keep mask of the kernels that share the seed."""
    grid = (triton.cdiv(x.numel(), ELEMENTS),)
    _dropout[grid](x, dropout.seed, out, x.numel(), dropout.keep_scale, dropout.threshold, ELEMENTS, num_warps=WARPS)
    return out
