"""Newton-Schulz iterations for matrices of any shapes together, three launches for each iteration.

The reference is `orthogonalized`. Each matrix is stored wide (rows <= columns), in rows and columns that are padded
with zeros to whole blocks: products of zeros are zeros, so that no kernel needs a mask, and a table of blocks is all
that tells one shape from another. The Gram matrix and the polynomial in it are symmetric, so the blocks below the
diagonal are copies of those above.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braidlm.kernels.ops.launch import Blocks
from braidlm.kernels.optional_triton import tl, triton

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial, as in torch: it brings singular values near 1 in few steps, but not to it."""
SMALLEST_NORM = 1e-7
UNIT, LARGE_UNIT = 64, 128
"""Rows and columns are padded to multiples of one of these: of the large one where it wastes little."""
MAX_WASTE = 1.1


class ProductBlocks(NamedTuple):
    """The blocks of products; in each dimension they divide the unit."""

    symmetric: Blocks
    """Blocks with as many rows as columns, for symmetric products."""
    wide: Blocks


BLOCKS = {
    UNIT: ProductBlocks(Blocks(64, 64, 64, 4, 4), Blocks(64, 64, 64, 4, 4)),
    LARGE_UNIT: ProductBlocks(Blocks(128, 128, 64, 8, 3), Blocks(128, 128, 64, 8, 3)),
}
COLUMNS = 7
"""Columns of the tables, for each program: its matrix, the length of the inner dimension, the length of the output's
rows, and the offsets of the left and the right factor, of the output and of its mirror in a symmetric product."""


class Place(NamedTuple):
    """Where a matrix is stored, wide and padded; a tall one is stored transposed."""

    offset: int
    rows: int
    columns: int
    gram_offset: int
    unit: int
    transposed: bool


@triton.jit
def _row(table, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's row of a table."""
    table += tl.program_id(0) * COLUMNS
    matrix, inner, stride = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    left, right, out, mirror = tl.load(table + 3), tl.load(table + 4), tl.load(table + 5), tl.load(table + 6)
    inner, stride, out = tl.multiple_of(inner, 64), tl.multiple_of(stride, 64), tl.multiple_of(out, 64)
    left, right, mirror = tl.multiple_of(left, 64), tl.multiple_of(right, 64), tl.multiple_of(mirror, 64)
    return matrix, inner, stride, left, right, out, mirror


@triton.jit
def _symmetric_products(  # type: ignore[no-untyped-def]
    table, x, scales, result, beta, alpha,
    SQUARE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """alpha x x^T, x times its scale if there are scales; SQUARE: x is square, and beta x is added."""
    matrix, inner, stride, left, right, out, mirror = _row(table, COLUMNS)
    row, at = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    lefts = x + left + row[:, None] * inner + at[None, :]
    offsets = row[:, None] * stride + row[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    if mirror == out:  # on the diagonal both factors are the same rows, which are read once
        for _ in range(0, inner, BLOCK_K):
            rows = tl.load(lefts)
            total = tl.dot(rows, tl.trans(rows), total, input_precision="ieee")
            lefts += BLOCK_K
    else:
        rights = x + right + row[None, :] * inner + at[:, None]
        for _ in range(0, inner, BLOCK_K):
            total = tl.dot(tl.load(lefts), tl.load(rights), total, input_precision="ieee")
            lefts += BLOCK_K
            rights += BLOCK_K
    total *= alpha
    if scales is not None:
        scale = tl.load(scales + matrix)
        total *= scale * scale
    if SQUARE:
        total += beta * tl.load(x + out + offsets).to(tl.float32)
    total = total.to(result.dtype.element_ty)
    tl.store(result + out + offsets, total)
    if mirror != out:
        tl.store(result + mirror + offsets, tl.trans(total))


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    table, polynomial, x, scales, result, beta,
    COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """beta x + polynomial x, x times its scale if there are scales."""
    matrix, inner, stride, left, right, out, _ = _row(table, COLUMNS)
    row, column, at = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    lefts = polynomial + left + row[:, None] * inner + at[None, :]
    rights = x + right + at[:, None] * stride + column[None, :]
    offsets = out + row[:, None] * stride + column[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, inner, BLOCK_K):
        total = tl.dot(tl.load(lefts), tl.load(rights), total, input_precision="ieee")
        lefts += BLOCK_K
        rights += BLOCK_K * stride
    total += beta * tl.load(x + offsets).to(tl.float32)
    if scales is not None:
        total *= tl.load(scales + matrix)
    tl.store(result + offsets, total.to(result.dtype.element_ty))


class NewtonSchulz:
    """The iterations for matrices of given shapes."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], device: torch.device, blocks: dict[int, ProductBlocks] | None = None
    ):
        """Shapes [rows, columns] are wide or tall. `blocks` are those of a unit."""
        self.blocks = blocks or BLOCKS
        self.places: list[Place] = []
        self.elements = self.gram_elements = 0
        for shape in shapes:
            rows, columns = sorted(shape)
            unit = LARGE_UNIT if _padded(rows, LARGE_UNIT) <= MAX_WASTE * _padded(rows, UNIT) else UNIT
            rows, columns = _padded(rows, unit), _padded(columns, unit)
            self.places.append(Place(self.elements, rows, columns, self.gram_elements, unit, shape[0] > shape[1]))
            self.elements += rows * columns
            self.gram_elements += rows * rows
        self.tables = {unit: self._tables(unit, device) for unit in sorted({place.unit for place in self.places})}

    def _tables(self, unit: int, device: torch.device) -> list[Tensor]:
        """The tables of Gram matrices, of their polynomials and of the products with these; long ones come first."""
        places = [(matrix, place) for matrix, place in enumerate(self.places) if place.unit == unit]
        places.sort(key=lambda place: -place[1].columns)
        symmetric, wide = self.blocks[unit]
        gram, polynomial, products = [], [], []
        for matrix, (offset, rows, columns, gram_offset, *_) in places:
            for i, j in product(range(0, rows, symmetric.rows), repeat=2):
                if i <= j:
                    left, right = gram_offset + i * rows, gram_offset + j * rows
                    gram.append(
                        (matrix, columns, rows, offset + i * columns, offset + j * columns, left + j, right + i)
                    )
                    polynomial.append((matrix, rows, rows, left, right, left + j, right + i))
            for i, j in product(range(0, rows, wide.rows), range(0, columns, wide.columns)):
                out = offset + i * columns + j
                products.append((matrix, rows, columns, gram_offset + i * rows, offset + j, out, out))
        return [torch.tensor(rows, dtype=torch.int64, device=device) for rows in (gram, polynomial, products)]

    def run(self, x: Tensor, scales: Tensor, steps: int) -> Tensor:
        """The stored matrices x [elements], each times its scale, with singular values near 1; x is overwritten."""
        other = torch.empty_like(x)
        gram, polynomial = (x.new_empty(self.gram_elements) for _ in range(2))
        for index in range(steps):
            for unit in self.tables:
                self._iterate(unit, x, scales if index == 0 else None, gram, polynomial, other)
            x, other = other, x
        return x

    def _iterate(
        self, unit: int, x: Tensor, scales: Tensor | None, gram: Tensor, polynomial: Tensor, result: Tensor
    ) -> None:
        a, b, c = COEFFICIENTS
        grams, polynomials, products = self.tables[unit]
        symmetric, wide = self.blocks[unit]
        if x.dtype == torch.float32:  # it takes twice the memory
            symmetric, wide = (replace(blocks, inner=32, warps=8, stages=2) for blocks in (symmetric, wide))
        sizes: Any = {"COLUMNS": COLUMNS, "BLOCK": symmetric.rows, "BLOCK_K": symmetric.inner, **symmetric.launch}
        _symmetric_products[(len(grams),)](grams, x, scales, gram, 0.0, 1.0, SQUARE=False, **sizes)
        _symmetric_products[(len(polynomials),)](polynomials, gram, None, polynomial, b, c, SQUARE=True, **sizes)
        _products[(len(products),)](
            products, polynomial, x, scales, result, a, COLUMNS, wide.rows, wide.columns, wide.inner, **wide.launch
        )  # fmt: skip


def _padded(size: int, unit: int) -> int:
    return triton.cdiv(size, unit) * unit


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Matrices [matrix, row, column] with their singular values brought near 1, by Newton-Schulz iterations."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
