"""Pieces of kernels over whole rows of the stream: where a tile is, what is added to it, and how it is stored.

Triton inlines them: a kernel is as if they were written out in it.
"""

from braidlm.kernels.ops.dropout import apply_dropout
from braidlm.kernels.optional_triton import tl, triton


@triton.jit
def tile_of_program(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of this program, all columns, which columns and elements there are, and the elements' offsets."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    column_mask = column < width
    mask = (row < rows)[:, None] & column_mask
    return row, column, column_mask, mask, row.to(tl.int64)[:, None] * width + column


@triton.jit
def addition(  # type: ignore[no-untyped-def]
    delta, bias, seed, offsets, mask, column, column_mask, keep_scale, THRESHOLD: tl.constexpr
):
    """What a layer adds to the stream: its output and bias, after dropout."""
    added = tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        added += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)
    return apply_dropout(added, seed, offsets, keep_scale, THRESHOLD)


@triton.jit
def stored(x, out, offsets, mask):  # type: ignore[no-untyped-def]
    """Store a tile; returns it as all others read it, rounded."""
    rounded = x.to(out.dtype.element_ty)
    tl.store(out + offsets, rounded, mask=mask)
    return rounded.to(tl.float32)


@triton.jit
def store_gradients(  # type: ignore[no-untyped-def]
    x_gradient, gradient, delta_gradient, seed, offsets, mask, keep_scale, THRESHOLD: tl.constexpr
):
    """Store the gradient of the stream, and, where dropout makes it another, of what was added; returns the latter."""
    tl.store(gradient + offsets, x_gradient.to(gradient.dtype.element_ty), mask=mask)
    if THRESHOLD:
        x_gradient = apply_dropout(x_gradient, seed, offsets, keep_scale, THRESHOLD)
        tl.store(delta_gradient + offsets, x_gradient.to(delta_gradient.dtype.element_ty), mask=mask)
    return x_gradient
