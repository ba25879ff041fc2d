"""What the kernels of stick-breaking attention share: tiles, and the arithmetic of one tile."""

from dataclasses import dataclass

from braidlm.kernels.optional_triton import tl, triton


@dataclass(frozen=True)
class Tile:
    """How a kernel is launched."""

    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile, the same in all kernels since one stores what another reads by tile."""

    queries: int
    keys: int
    span: int
    """Tiles of keys after which the forward pass looks whether anything is left of the sticks."""
    attend: Tile
    query_gradient: Tile
    key_gradient: Tile


TILES = {
    2: Tiles(64, 32, 4, attend=Tile(4, 3), query_gradient=Tile(4, 1), key_gradient=Tile(4, 2)),
    4: Tiles(32, 32, 2, attend=Tile(4, 2), query_gradient=Tile(4, 1), key_gradient=Tile(4, 1)),
}
"""By bytes of an element; tuned for heads of 64 on an H200."""

LOG2_E = 1.4426950408889634
GONE = 100.0
"""Where less than 2^-100 of a stick is left, nothing reaches a result, and no further key is read."""


@triton.jit
def load_rows(base, row, stride, limit, DIM: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of DIM channels, as a tile of WIDE; zeros from row `limit` on."""
    channel = tl.arange(0, WIDE)[None, :]
    mask = (row < limit)[:, None]
    if DIM < WIDE:
        mask = mask & (channel < DIM)
    return tl.load(base + row[:, None] * stride + channel, mask=mask, other=0.0)


@triton.jit
def store_rows(base, row, stride, limit, x, DIM: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.arange(0, WIDE)[None, :]
    mask = (row < limit)[:, None]
    if DIM < WIDE:
        mask = mask & (channel < DIM)
    tl.store(base + row[:, None] * stride + channel, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def is_seen(key, position, first_key, CURRENT: tl.constexpr):  # type: ignore[no-untyped-def]
    return (key < position + CURRENT) & (key >= first_key)


@triton.jit
def log_break(z):  # type: ignore[no-untyped-def]
    """log2(1 + 2^z): by how much a key with score z shortens what is left of the stick."""
    return tl.where(z > 24.0, z, tl.log2(1.0 + tl.exp2(z)))


@triton.jit
def sums_from(s, KEYS: tl.constexpr, AXIS: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each key of a tile (along AXIS): the sum of s over it and the keys after it.

    A product with ones; in half precision, whose 11 bits are more than the 8 that the weights are rounded to.
    """
    i, j = tl.arange(0, KEYS)[:, None], tl.arange(0, KEYS)[None, :]
    narrow = s if EXACT else tl.minimum(s, 60000.0).to(tl.float16)
    if AXIS == 1:
        sums = tl.dot(narrow, (i >= j).to(narrow.dtype), input_precision="ieee")
    else:
        sums = tl.dot((i <= j).to(narrow.dtype), narrow, input_precision="ieee")
    return sums


@triton.jit
def sums_to(g, KEYS: tl.constexpr, AXIS: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each key of a tile (along AXIS): the sum of g over it and the keys before it; gradients need bf16's range."""
    i, j = tl.arange(0, KEYS)[:, None], tl.arange(0, KEYS)[None, :]
    narrow = g if EXACT else g.to(tl.bfloat16)
    if AXIS == 1:
        sums = tl.dot(narrow, (i <= j).to(tl.float32).to(narrow.dtype), input_precision="ieee")
    else:
        sums = tl.dot((i >= j).to(tl.float32).to(narrow.dtype), narrow, input_precision="ieee")
    return sums
