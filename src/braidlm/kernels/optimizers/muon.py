"""Clipping and Muon for all matrices of a model: a pass before the products, the products, and a pass after them.

The reference is `clip_grads_with_norm_`, a product of the weights with their factors, and the step of BatchedMuon,
whose momentum is updated in place.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braidlm.kernels.optimizers.batched_muon import SMALLEST_NORM, BatchedMuon, lr_ratio
from braidlm.kernels.optimizers.gradient_norm import clip_factor
from braidlm.kernels.optimizers.newton_schulz import NewtonSchulz
from braidlm.kernels.optimizers.tables import AddressTable, factors_of
from braidlm.kernels.optional_triton import tl, triton

TILE, WARPS = 64, 4
"""Rows and columns that a program reads; blocks of the products are made of whole tiles."""
COLUMNS = 9
"""Columns of the table: addresses of weight, gradient, momentum and learning rate, rows and columns, in the stack of
all matrices the offset and the length of rows, negative for a matrix that is stored transposed, and the address of the
weight's factor."""


@triton.jit
def _tile(table, tiles, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's entry of the table, and its elements: offsets and mask in the parameter, offsets in the stack."""
    tiles += tl.program_id(0) * 3
    index = tl.load(tiles)
    row = tl.multiple_of(tl.load(tiles + 1), TILE) + tl.arange(0, TILE)
    column = tl.multiple_of(tl.load(tiles + 2), TILE) + tl.arange(0, TILE)
    entry = table + index * COLUMNS
    rows, columns = tl.load(entry + 4), tl.load(entry + 5)
    if ALIGNED:
        columns = tl.multiple_of(columns, 4)
    begin, stride = tl.multiple_of(tl.load(entry + 6), 64), tl.multiple_of(tl.load(entry + 7), 64)
    offsets = row[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return index, entry, row, column, offsets, mask, begin, stride


@triton.jit
def _address(entry, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    address = tl.load(entry).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit
def _directions(  # type: ignore[no-untyped-def]
    table, tiles, norm, clip, stack, sums,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, CLIPS: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Update the momentum; write the directions into the stack, padded with zeros, and the sums of their squares."""
    _, entry, row, column, offsets, mask, begin, stride = _tile(table, tiles, ALIGNED, COLUMNS, TILE)
    averages = _address(entry + 2, ALIGNED) + offsets
    gradient = tl.load(_address(entry + 1, ALIGNED) + offsets, mask=mask, other=0.0)
    average = tl.load(averages, mask=mask, other=0.0)
    if CLIPS:
        gradient *= clip_factor(norm, clip)
    average += (1.0 - MOMENTUM) * (gradient - average)
    tl.store(averages, average, mask=mask)
    direction = average + (1.0 - MOMENTUM) * (gradient - average) if NESTEROV else average
    direction = direction.to(stack.dtype.element_ty)
    if stride < 0:
        tl.store(stack + begin - column[:, None] * stride + row[None, :], tl.trans(direction))
    else:
        tl.store(stack + begin + row[:, None] * stride + column[None, :], direction)
    rounded = direction.to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(rounded * rounded))


@triton.jit
def _scales(sums, ends, scales, smallest, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """By what each matrix is multiplied to have the norm 1."""
    matrix = tl.program_id(0)
    first, end = tl.load(ends + matrix), tl.load(ends + matrix + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(first, end, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + offsets, mask=offsets < end, other=0.0)
    tl.store(scales + matrix, 1.0 / tl.maximum(tl.sqrt(tl.sum(total)), smallest))


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    table, tiles, ratios, stack, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    """Weights take a step in the direction that the stack holds, and decay; `ratios` of the rate: step, decay."""
    index, entry, row, column, offsets, mask, begin, stride = _tile(table, tiles, ALIGNED, COLUMNS, TILE)
    weights = _address(entry, ALIGNED) + offsets
    lr = tl.load(tl.load(entry + 3).to(tl.pointer_type(tl.float32)))
    ratio, decay = tl.load(ratios + 2 * index), tl.load(ratios + 2 * index + 1)
    factor = tl.load(tl.load(entry + 8).to(tl.pointer_type(tl.float32)))
    weight = tl.load(weights, mask=mask, other=0.0)
    if stride < 0:
        direction = tl.trans(tl.load(stack + begin - column[:, None] * stride + row[None, :]))
    else:
        direction = tl.load(stack + begin + row[:, None] * stride + column[None, :])
    weight = weight * ((1.0 - lr * decay) * factor) - lr * ratio * direction.to(tl.float32)
    tl.store(weights, weight, mask=mask)


class Matrix(NamedTuple):
    """A parameter, or a member of one that is a bank."""

    parameter: Tensor
    group: dict[str, Any]
    first: int
    """The index of the matrix's first element in the parameter."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.parameter.shape[-2:]
        return rows, columns

    @property
    def is_tall(self) -> bool:
        """Then it is stored transposed in the stack."""
        rows, columns = self.shape
        return rows > columns


class FusedMuon:
    """The steps of one optimizer whose learning rates are tensors on the device."""

    def __init__(self, optimizer: BatchedMuon, factors: Mapping[Tensor, Tensor]):
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.matrices = list(_matrices(optimizer))
        device = self.parameters[0].device
        self.newton_schulz = NewtonSchulz([matrix.shape for matrix in self.matrices], device)
        self.table = AddressTable(len(self.matrices), COLUMNS, device)
        ratios = [(lr_ratio(m.parameter, m.group["adjust_lr_fn"]), m.group["weight_decay"]) for m in self.matrices]
        self.ratios = torch.tensor(ratios, dtype=torch.float32, device=device)
        self.factors = factors_of([matrix.parameter for matrix in self.matrices], factors)
        tiles, ends = self._tiles()
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self.ends = torch.tensor(ends, dtype=torch.int32, device=device)

    def _tiles(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """For each tile its matrix, first row and first column, padding included; and how many precede each matrix."""
        tiles: list[tuple[int, int, int]] = []
        ends = [0]
        for index, (matrix, place) in enumerate(zip(self.matrices, self.newton_schulz.places, strict=True)):
            rows, columns = (place.columns, place.rows) if matrix.is_tall else (place.rows, place.columns)
            tiles += [(index, row, column) for row in range(0, rows, TILE) for column in range(0, columns, TILE)]
            ends.append(len(tiles))
        return tiles, ends

    def counts(self) -> list[Tensor | None]:
        """Muon counts no steps."""
        return [None] * len(self.parameters)

    def step(self, norm: Tensor, clip: float | None) -> None:
        """Update the parameters by gradients that are scaled down if the norm is above `clip`."""
        rows = self._rows()
        aligned = all(value % 16 == 0 for row in rows for value in row[:3]) and all(row[5] % 4 == 0 for row in rows)
        table, group = self.table.write(rows), self.optimizer.param_groups[0]
        stack = torch.empty(self.newton_schulz.elements, dtype=self.optimizer.dtype, device=table.device)
        sums = torch.empty(len(self.tiles), dtype=torch.float32, device=table.device)
        _directions[(len(self.tiles),)](
            table, self.tiles, norm, clip or 0.0, stack, sums,
            group["momentum"], group["nesterov"], clip is not None, aligned, COLUMNS, TILE, num_warps=WARPS,
        )  # fmt: skip
        scales = sums.new_empty(len(self.matrices))
        _scales[(len(scales),)](sums, self.ends, scales, SMALLEST_NORM, 128, num_warps=1)
        stack = self.newton_schulz.run(stack, scales, group["ns_steps"])
        _update[(len(self.tiles),)](
            table, self.tiles, self.ratios, stack, aligned, COLUMNS, TILE, num_warps=WARPS
        )  # fmt: skip

    def _rows(self) -> list[list[int]]:
        rows = []
        for matrix, place, factor in zip(self.matrices, self.newton_schulz.places, self.factors, strict=True):
            parameter, group, first = matrix
            assert parameter.grad is not None
            tensors = (parameter, parameter.grad, self.optimizer.state[parameter]["momentum_buffer"])
            addresses = [tensor.data_ptr() + first * tensor.element_size() for tensor in tensors]
            stride = -place.columns if matrix.is_tall else place.columns
            rows.append([*addresses, group["lr"].data_ptr(), *matrix.shape, place.offset, stride, factor.data_ptr()])
        return rows


def _matrices(optimizer: BatchedMuon) -> Iterator[Matrix]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rows, columns = parameter.shape[-2:]
            for first in range(0, parameter.numel(), rows * columns):
                yield Matrix(parameter, group, first)
