"""The block of a matrix product that a program computes, and how it is launched."""

from dataclasses import dataclass

from braidlm.kernels.ops.launch import register_limit
from braidlm.kernels.optional_triton import triton

MIN_BLOCK = 16
"""A tensor core's minimum in any dimension."""


@dataclass(frozen=True)
class Blocks:
    """A program's block of a product [rows, columns], its step over the inner dimension, and its launch options."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    max_registers: int | None = None
    """Per thread, where a limit lets a multiprocessor run more programs at once."""

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages, **register_limit(self.max_registers)}


FLOAT32_BLOCKS = Blocks(64, 64, 32, 4, 2)
"""Smaller, since float32 takes twice the memory."""


def fit_blocks(blocks: Blocks, rows: int, columns: int, inner: int) -> tuple[int, int, int]:
    """Block sizes that are not much larger than their dimensions."""
    sizes = zip((blocks.rows, blocks.columns, blocks.inner), (rows, columns, inner), strict=True)
    m, n, k = (min(block, max(MIN_BLOCK, triton.next_power_of_2(size))) for block, size in sizes)
    return m, n, k
