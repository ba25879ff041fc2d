"""The second stage of sums over rows: the partial sums of a kernel's programs become one vector.

Kernels of several layers write their partial sums into one tensor, and the last of them sums all by one launch.
"""

import torch
from torch import Tensor

from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import current_side_stream, on_side

ROWS, COLUMNS, WARPS = 512, 8, 4


@triton.jit
def _column_sums(sums, totals, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums += tl.program_id(1).to(tl.int64) * rows * width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, rows, ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        total += tl.load(sums + row * width + column[None, :], mask=(row < rows) & (column < width)[None, :], other=0.0)
    tl.store(totals + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < width)


class ColumnSums:
    """The partial sums [programs, width] of some kernels of one shape, and their totals [width]."""

    def __init__(self, kernels: int):
        self.kernels, self.pending, self.side = kernels, kernels, current_side_stream()
        self.sums: Tensor | None = None
        self.totals: Tensor | None = None

    def buffer(self, programs: int, width: int, device: torch.device) -> Tensor:
        """Where the next kernel's programs write their sums."""
        if self.sums is None:
            self.sums = torch.empty(self.kernels, programs, width, dtype=torch.float32, device=device)
            self.totals = self.sums.new_empty(self.kernels, width)
        assert self.sums.shape == (self.kernels, programs, width)
        return self.sums[self.pending - 1]

    def total(self) -> Tensor:
        """The total of the newest sums; complete when all kernels are done and the side stream is synchronized."""
        assert self.sums is not None
        assert self.totals is not None
        self.pending -= 1
        if not self.pending:
            _, programs, width = self.sums.shape
            with on_side(self.side, self.sums, priority=True):
                _column_sums[(triton.cdiv(width, COLUMNS), self.kernels)](
                    self.sums, self.totals, programs, width, ROWS, COLUMNS, num_warps=WARPS
                )
        return self.totals[self.pending].data
