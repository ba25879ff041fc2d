"""What the kernels of attention for routed queries share: tiles, the causal mask, the dropout keep mask."""

from dataclasses import dataclass

from braidlm.kernels.optional_triton import tl, triton


@dataclass(frozen=True)
class Tile:
    """A program's queries and keys, and its launch options."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """The arguments of a launch."""
        return {"QUERIES": self.queries, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels."""

    attend: Tile
    query_gradient: Tile
    key_gradient: Tile


TILES = {
    2: Tiles(attend=Tile(64, 64, 4, 3), query_gradient=Tile(64, 32, 4, 3), key_gradient=Tile(32, 64, 4, 1)),
    4: Tiles(attend=Tile(32, 32, 4, 2), query_gradient=Tile(32, 32, 4, 2), key_gradient=Tile(32, 32, 4, 2)),
}
"""By bytes of an element; tuned for heads of 64 on an H200."""


@triton.jit
def part_of_program(blocks, heads):  # type: ignore[no-untyped-def]
    """Block, sequence and head of a program; neighbouring programs read neighbouring heads."""
    index = tl.program_id(0)
    return (index // heads) % blocks, index // (heads * blocks), index % heads


@triton.jit
def keep_mask(step, offset, key, THRESHOLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The dropout keep mask of two random words per row and a key, as tensors that broadcast."""
    x = step * key.to(tl.uint32) + offset
    x = (x ^ (x >> 16)) * (offset | 1)
    return x >= tl.full([1, 1], THRESHOLD, tl.uint32)


@triton.jit
def key_range(source, begin, end, origin, KEYS: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """For rows begin..end: the first key, the first that needs a mask, and the end of the keys."""
    earliest = tl.load(source + begin) - origin
    latest = tl.load(source + end - 1) - origin
    if WINDOW > 0:
        lowest = tl.maximum(earliest - WINDOW + 1, 0)
        masked = lowest
    else:
        lowest = 0
        masked = (earliest + 1) // KEYS * KEYS
    return lowest, masked, latest + 1


@triton.jit
def is_visible(key, position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    visible = key <= position
    if WINDOW > 0:
        visible = visible & (key > position - WINDOW)
    return visible
