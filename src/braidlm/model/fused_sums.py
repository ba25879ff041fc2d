"""The second stage of a sum over rows: the programs' sums into one."""

import torch
from torch import Tensor

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

ROWS, COLUMNS, WARPS = 512, 8, 4


@triton.jit
def _column_sums(sums, totals, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, rows, ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        total += tl.load(sums + row * width + column[None, :], mask=(row < rows) & (column < width)[None, :], other=0.0)
    tl.store(totals + column, tl.sum(total, 0), mask=column < width)


def column_sums(sums: Tensor) -> Tensor:
    """[rows, width] float32 -> [width]."""
    rows, width = sums.shape
    totals = torch.empty(width, dtype=torch.float32, device=sums.device)
    _column_sums[(triton.cdiv(width, COLUMNS),)](sums, totals, rows, width, ROWS, COLUMNS, num_warps=WARPS)
    return totals
