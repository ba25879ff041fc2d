"""What launches need: facts about the device, the sizes of tiles and blocks, and tables of addresses on the device."""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from braidlm.kernels.optional_triton import triton

ELEMENTS = 512
"""Elements of a warp's tile: a row that fits into one warp needs no synchronization with others."""
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


@cache
def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a GPU; elsewhere (in Triton's interpreter) a few, so that loops over tiles are tested."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def programs_for(device: torch.device, per_sm: int, tiles: int, groups: int = 1) -> int:
    """The programs for each group's tiles, as many for each; those of all groups fill the device."""
    largest = max(1, multiprocessors(device) * per_sm // groups)
    return max(1, triton.cdiv(tiles, triton.cdiv(max(1, tiles), largest)))


def row_tile(width: int) -> dict[str, int]:
    """The tile of whole rows that a program reads, and its warps."""
    columns = 1 << (width - 1).bit_length()
    return {"ROWS": max(1, ELEMENTS // columns), "COLUMNS": columns, "num_warps": max(1, min(16, columns // ELEMENTS))}


def register_limit(registers: int | None) -> dict[str, int]:
    """The option of a launch for at most so many registers per thread, which only NVIDIA's compiler knows."""
    return {"maxnreg": registers} if registers and torch.version.cuda else {}


def is_nvidia(x: Tensor) -> bool:
    """Whether a kernel may use NVIDIA's own instructions: not in Triton's interpreter, nor on other GPUs."""
    return x.is_cuda and torch.version.cuda is not None


@lru_cache(maxsize=128)  # a capture refuses copies from the host, and addresses of parameters hardly ever change
def addresses(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
