"""Rotary positions inside kernels: pairs of channels are rotated, and gradients are rotated back.

A kernel holds the first channels of all pairs and the second ones as two tiles: so nothing is read twice or exchanged
between threads. The tables are as `RotaryPositions` has them: the cosine of both channels of a pair is the same, and
the sine of the second is that of the first with the other sign, so that only those of the first are read.
"""

from torch import Tensor

from braidlm.kernels.optional_triton import tl, triton

Rotary = tuple[Tensor, Tensor, Tensor | None]
"""Cosine and signed sine [position, dim], and [rows] the position of each row, or None where that is its place in its
sequence.
"""

ROWS, HEADS, WARPS = 8, 4, 4
"""A program's rows and heads, and its warps."""


@triton.jit
def pairs_of_head(PAIRS: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the second channel of each pair, and which pairs there are."""
    pair = tl.arange(0, PAIRS)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + DIM // 2
    return first, second, pair < DIM // 2


@triton.jit
def table_offsets(index, row, mask, time, first, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the tables have the pairs whose first channels are given, for rows counted over all sequences.

    Load them in the shape of what they rotate: a smaller one would be exchanged between threads, which costs more.
    """
    if index is None:
        position = row % time
    else:
        position = tl.load(index + row, mask=mask, other=0)
    return position * DIM + first


@triton.jit
def rotated_pairs(first, second, cos, sin):  # type: ignore[no-untyped-def]
    """Both channels of each pair after the rotation; with the sine's other sign, of their gradients back."""
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def rotated_back(  # type: ignore[no-untyped-def]
    x, cos, sin, index, row, mask, time, ROWS: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Gradients [rows, channels] of rotated heads as those of the heads before; the channels are a power of two."""
    if INTERLEAVED:
        pairs = tl.reshape(x, [ROWS, DIM // 2, 2])
    else:
        pairs = tl.permute(tl.reshape(x, [ROWS, 2, DIM // 2]), (0, 2, 1))
    a, b = tl.split(pairs)
    first, _, _ = pairs_of_head(DIM // 2, DIM, INTERLEAVED)
    angle = table_offsets(index, row[:, None], mask[:, None], time, first[None, :], DIM)
    c, s = tl.load(cos + angle, mask=mask[:, None], other=0.0), tl.load(sin + angle, mask=mask[:, None], other=0.0)
    a, b = rotated_pairs(a, b, c, -s)
    pairs = tl.join(a, b)
    if not INTERLEAVED:
        pairs = tl.permute(pairs, (0, 2, 1))
    return tl.reshape(pairs, [ROWS, DIM])


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    source, cos, sin, index, target, rows, time, heads, source_heads, target_heads, INTERLEAVED: tl.constexpr,
    DIM: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[None, :, None]
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None, None]
    first, second, pair_mask = pairs_of_head(PAIRS, DIM, INTERLEAVED)
    first, second, mask = first[None, None, :], second[None, None, :], (row < rows) & (head < heads)
    mask = mask & pair_mask[None, None, :]
    angle = tl.broadcast_to(table_offsets(index, row, row < rows, time, first, DIM), [ROWS, HEADS, PAIRS])
    c, s = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)
    source += (row.to(tl.int64) * source_heads + head) * DIM
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    a, b = rotated_pairs(a, b, c, s)
    target += (row.to(tl.int64) * target_heads + head) * DIM
    tl.store(target + first, a.to(target.dtype.element_ty), mask=mask)
    tl.store(target + second, b.to(target.dtype.element_ty), mask=mask)


def rotate_heads(source: Tensor, target: Tensor, heads: int, rotary: Rotary, interleaved: bool) -> None:
    """Write the first `heads` of source [batch, time, heads, dim], rotated, as those of target; both may be one."""
    time, source_heads, dim = source.shape[1:]
    rows = len(source) * time
    assert source.is_contiguous()
    assert target.is_contiguous()
    _rotate_heads[(triton.cdiv(heads, HEADS), triton.cdiv(rows, ROWS))](
        source, *rotary, target, rows, time, heads, source_heads, target.shape[2], interleaved, dim,
        triton.next_power_of_2(dim // 2), ROWS, HEADS, num_warps=WARPS,
    )  # fmt: skip
