"""Newton-Schulz iterations for matrices of any shapes together, three launches for each iteration.

The reference is `orthogonalized`. Each matrix is stored wide (rows <= columns), in rows and columns that are padded
with zeros to whole blocks: products of zeros are zeros, so that no kernel needs a mask, and a table of blocks is all
that tells one shape from another. The Gram matrix and the polynomial in it are symmetric, so the blocks below the
diagonal are copies of those above.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from braidlm.kernels.optimizers.batched_muon import COEFFICIENTS


class Sizes(NamedTuple):
    """A program's step over the inner dimension, which is at most its block, and its launch options."""

    inner: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        return {"BLOCK_K": self.inner, "num_warps": self.warps, "num_stages": self.stages}


SMALL, LARGE = 64, 128
"""Rows and columns of a block; a matrix has large ones where they waste little."""
MAX_WASTE = 1.1
SIZES = {SMALL: Sizes(64, 4, 4), LARGE: Sizes(64, 8, 3)}
FLOAT32_SIZES = Sizes(32, 8, 2)
"""Smaller, since float32 takes twice the memory."""
COLUMNS = 7
"""Of the tables, for each program: its matrix, the length of the inner dimension, the length of the output's rows, and
the offsets of the left and the right factor, of the output and (in the table of symmetric products) of its mirror."""


class Place(NamedTuple):
    """Where a matrix is stored, wide and padded."""

    offset: int
    rows: int
    columns: int
    gram_offset: int
    block: int


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
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """beta x + polynomial x, x times its scale if there are scales."""
    matrix, inner, stride, left, right, out, _ = _row(table, COLUMNS)
    row, at = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    lefts = polynomial + left + row[:, None] * inner + at[None, :]
    rights = x + right + at[:, None] * stride + row[None, :]
    offsets = out + row[:, None] * stride + row[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
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

    def __init__(self, shapes: Sequence[tuple[int, int]], device: torch.device, sizes: dict[int, Sizes] | None = None):
        """Shapes [rows, columns] are wide or tall; a tall matrix is stored transposed."""
        self.sizes = sizes or SIZES
        self.places: list[Place] = []
        self.elements = self.gram_elements = 0
        for shape in shapes:
            self._place(min(shape), max(shape))
        blocks = sorted({place.block for place in self.places})
        self.tables = {block: self._tables(block, device) for block in blocks}

    def _place(self, rows: int, columns: int) -> None:
        block = LARGE if _padded(rows, LARGE) <= MAX_WASTE * _padded(rows, SMALL) else SMALL
        rows, columns = _padded(rows, block), _padded(columns, block)
        self.places.append(Place(self.elements, rows, columns, self.gram_elements, block))
        self.elements += rows * columns
        self.gram_elements += rows * rows

    def _tables(self, block: int, device: torch.device) -> list[Tensor]:
        """Of the Gram matrices, of their polynomials and of the products with these; long products come first."""
        places = [(matrix, place) for matrix, place in enumerate(self.places) if place.block == block]
        places.sort(key=lambda place: -place[1].columns)
        gram, polynomial, product = [], [], []
        for matrix, (offset, rows, columns, gram_offset, _) in places:
            for i in range(0, rows, block):
                left = gram_offset + i * rows
                for j in range(i, rows, block):
                    outs = (left + j, gram_offset + j * rows + i)
                    gram.append((matrix, columns, rows, offset + i * columns, offset + j * columns, *outs))
                    polynomial.append((matrix, rows, rows, left, gram_offset + j * rows, *outs))
                for j in range(0, columns, block):
                    product.append((matrix, rows, columns, left, offset + j, offset + i * columns + j, 0))
        return [torch.tensor(rows, dtype=torch.int64, device=device) for rows in (gram, polynomial, product)]

    def run(self, x: Tensor, scales: Tensor, steps: int) -> Tensor:
        """The stored matrices x [elements], each times its scale, with singular values near 1; x is overwritten."""
        a, b, c = COEFFICIENTS
        other = torch.empty_like(x)
        gram, polynomial = (x.new_empty(self.gram_elements) for _ in range(2))
        for index in range(steps):
            scaled = scales if index == 0 else None
            for block, (grams, polynomials, products) in self.tables.items():
                sizes = FLOAT32_SIZES if x.dtype == torch.float32 else self.sizes[block]
                launch: Any = {"COLUMNS": COLUMNS, "BLOCK": block, **sizes.launch}
                _symmetric_products[(len(grams),)](grams, x, scaled, gram, 0.0, 1.0, SQUARE=False, **launch)
                _symmetric_products[(len(polynomials),)](
                    polynomials, gram, None, polynomial, b, c, SQUARE=True, **launch
                )
                _products[(len(products),)](products, polynomial, x, scaled, other, a, **launch)
            x, other = other, x
        return x


def _padded(size: int, block: int) -> int:
    return triton.cdiv(size, block) * block
