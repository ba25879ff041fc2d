"""The blocks of products with a matrix for each expert, by their sizes.

They were the fastest of twelve or more on an H200 for banks of 192-768, 384-768 and 384-248 channels, and of ten for
banks of 1024-2048 channels and more. "Uneven" is what was measured at 248 channels: no multiple of a block.
"""

import torch

from braidlm.kernels.ops.product_blocks import FLOAT32_BLOCKS, Blocks
from braidlm.kernels.optional_triton import triton

LARGE = 1024
"""Channels from which on a program can hold a large block, and a product is long enough to fill the device with it."""
LARGE_BLOCKS = Blocks(128, 256, 64, 8, 4)
LARGE_BACKWARD_BLOCKS = Blocks(128, 128, 64, 8, 3)
"""With an activation's derivative, or sums, a program holds twice the elements."""
UNEVEN_BLOCKS = Blocks(128, 128, 64, 8, 3, 128)
UNEVEN_COMBINED_BLOCKS = Blocks(64, 64, 64, 4, 3, 128)


def _is_large(columns: int, inner: int) -> bool:
    return min(columns, inner) >= LARGE and columns % LARGE_BLOCKS.columns == 0


def product_blocks(columns: int, inner: int, dtype: torch.dtype, summed: bool = False) -> Blocks:
    if dtype == torch.float32:
        return FLOAT32_BLOCKS
    if _is_large(columns, inner):
        return LARGE_BACKWARD_BLOCKS if summed else LARGE_BLOCKS
    if not _fits(columns, 128) or (summed and columns % 128 == 0):
        return Blocks(128, 64, 64, 4, 3)
    return UNEVEN_BLOCKS if inner % 64 and not summed else Blocks(64, 128, 64, 4, 3)


def activated_blocks(columns: int, inner: int, dtype: torch.dtype) -> Blocks:
    if dtype == torch.float32:
        return FLOAT32_BLOCKS
    if _is_large(columns, inner):
        return LARGE_BLOCKS
    if not _fits(columns, 128):
        return Blocks(128, 64, 64, 8, 3)
    return UNEVEN_BLOCKS if columns % 128 else Blocks(128, 128, 64, 8, 3)


def combined_blocks(columns: int, inner: int, dtype: torch.dtype, gated: bool) -> Blocks:
    if dtype == torch.float32 or gated or columns % 128 == 0 or not _fits(columns, 128):
        return product_blocks(columns, inner, dtype, summed=True)
    return UNEVEN_COMBINED_BLOCKS


def _fits(columns: int, block: int) -> bool:
    """Whether blocks waste little of their last one."""
    return triton.cdiv(columns, block) * block <= 1.1 * columns
