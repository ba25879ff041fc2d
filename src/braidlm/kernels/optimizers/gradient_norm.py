"""The norm of all gradients in one pass over memory, and what else kernels over many tensors share.

These read a table on the device: addresses and sizes of tensors, and factors of weights. The reference of the norm is
torch's `get_total_norm`, that of `clip_factor` is `clip_grads_with_norm_`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from braidlm.kernels.optional_triton import tl, triton

BLOCK, WARPS = 4096, 8
COLUMNS = 3
"""Columns of the table: addresses of gradient and step count (0 where there is none), and the number of elements."""


class AddressTable:
    """Integers [row, column] on the device: addresses and sizes, the same number of columns for each tensor."""

    def __init__(self, rows: int, columns: int, device: torch.device):
        self.tensor = torch.empty(rows, columns, dtype=torch.int64, device=device)
        self.captured: Tensor | None = None

    def write(self, rows: list[list[int]]) -> Tensor:
        """The table with these rows; inside of a capture, which refuses copies from the host, they are kept for later.

        Gradients have other addresses in a captured step than in the eager steps before.
        """
        if self.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            self.captured = torch.tensor(rows)
        else:
            self.tensor.copy_(torch.tensor(rows))
        return self.tensor

    def write_captured(self) -> None:
        """After a capture, write the rows that the captured step reads in each replay."""
        if self.captured is not None:
            self.tensor.copy_(self.captured)
            self.captured = None


def factors_of(parameters: Sequence[Tensor], factors: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """The factor of each parameter on its device, 1 for one that has none; a kernel reads them there in each step."""
    one = torch.ones((), device=parameters[0].device)
    return [factors.get(parameter, one) for parameter in parameters]


@triton.jit
def address(entry, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tensor of float32 whose address an entry of a table is."""
    pointer = tl.load(entry).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def number(entry):  # type: ignore[no-untyped-def]
    """The number on the device whose address an entry of a table is."""
    return tl.load(tl.load(entry).to(tl.pointer_type(tl.float32)))


@triton.jit
def clip_factor(norm, clip):  # type: ignore[no-untyped-def]
    """By which clipping multiplies gradients, as in torch."""
    return tl.minimum(1.0, clip / (tl.load(norm) + 1e-6))


@triton.jit
def _squared_sums(table, chunks, sums, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = table + tl.load(chunks + 2 * tl.program_id(0)) * COLUMNS
    chunk = tl.load(chunks + 2 * tl.program_id(0) + 1)
    count = tl.load(entry + 1)
    if (chunk == 0) & (count != 0):  # one program counts the parameter's step
        steps = count.to(tl.pointer_type(tl.float32))
        tl.store(steps, tl.load(steps) + 1.0)
    offsets = chunk * BLOCK + tl.arange(0, BLOCK)
    gradients = tl.load(entry).to(tl.pointer_type(tl.float32))
    size = tl.load(entry + 2)
    if ALIGNED:
        gradients, size = tl.multiple_of(gradients, 16), tl.multiple_of(size, 4)
    gradient = tl.load(gradients + offsets, mask=offsets < size, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(gradient * gradient))


@triton.jit
def _total_norm(sums, norm, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + offsets, mask=offsets < count, other=0.0)
    tl.store(norm, tl.sqrt(tl.sum(total)))


def chunks_of(parameters: Sequence[Tensor], size: int) -> Tensor:
    """Each program's parameter, and its chunk of `size` elements there: int32 [program, 2]."""
    chunks = [(index, chunk) for index, p in enumerate(parameters) for chunk in range(triton.cdiv(p.numel(), size))]
    return torch.tensor(chunks, dtype=torch.int32, device=parameters[0].device)


class GradientNorm:
    """The norm of the gradients of some parameters; it also counts the steps of those that have a count."""

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = parameters
        self.table = AddressTable(len(parameters), COLUMNS, parameters[0].device)
        self.chunks = chunks_of(parameters, BLOCK)

    def measure(self, counts: Sequence[Tensor | None]) -> Tensor:
        """The norm; each count is increased by one."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        rows = [
            [gradient.data_ptr(), 0 if count is None else count.data_ptr(), gradient.numel()]
            for gradient, count in zip(gradients, counts, strict=True)
        ]
        aligned = all(address % 16 == 0 and size % 4 == 0 for address, _, size in rows)
        table = self.table.write(rows)
        sums = torch.empty(len(self.chunks), dtype=torch.float32, device=table.device)
        _squared_sums[(len(sums),)](table, self.chunks, sums, aligned, COLUMNS, BLOCK, num_warps=WARPS)
        norm = sums.new_empty(())
        _total_norm[(1,)](sums, norm, len(sums), BLOCK, num_warps=WARPS)
        return norm
