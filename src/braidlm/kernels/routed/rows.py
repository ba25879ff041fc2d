"""What a block adds to the rows of its tokens, and their normalisation: one pass over memory forward and one backward.

Rows are sorted by block; each begins as its token's stream. The norm has no scale of its own here: the product that
reads it has it in its weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.dropout import kept, threshold
from braidlm.kernels.routed.combine import summed_rows
from braidlm.kernels.routed.gradient_stacks import GroupedGradientSlot
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.side_stream import DeferredGradient, SideStream, current_side_stream, on_side

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS, WARPS = 4096, 4
"""Numbers that a program works on."""


@triton.jit
def leave_normed(  # type: ignore[no-untyped-def]
    x, inside, row, offsets, column, summed, normed, means, scales, eps, WIDTH: tl.constexpr, CENTRED: tl.constexpr
):
    """Stores rows [ROWS, COLUMNS], and the same normalised; padding rows become zeros."""
    rounded = tl.where(inside, x, 0.0).to(summed.dtype.element_ty)
    tl.store(summed + offsets, rounded, mask=column < WIDTH)
    x = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / WIDTH
        tl.store(means + row, mean)
        x = tl.where(inside, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
    tl.store(scales + row, scale)
    tl.store(normed + offsets, (x * scale[:, None]).to(normed.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _rows_forward(  # type: ignore[no-untyped-def]
    stream, delta, source, tile_expert, seed, summed, normed, means, scales, eps, keep_scale,
    WIDTH: tl.constexpr, CENTRED: tl.constexpr, THRESHOLD: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(tile_expert + program * ROWS // TILE) < 0:
        return
    row = program * ROWS + tl.arange(0, ROWS)
    token = tl.load(source + row)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (token >= 0)[:, None] & (column < WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(stream + token.to(tl.int64)[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(delta + offsets, mask=inside, other=0.0).to(tl.float32)
    if THRESHOLD:
        y = tl.where(kept(seed, offsets, THRESHOLD), y * keep_scale, 0.0)
    leave_normed(x + y, inside, row, offsets, column, summed, normed, means, scales, eps, WIDTH, CENTRED)


@triton.jit
def _rows_backward(  # type: ignore[no-untyped-def]
    normed_gradient, summed_gradient, summed, source, tile_expert, seed, means, scales, gradient, delta_gradient,
    keep_scale,
    WIDTH: tl.constexpr, CENTRED: tl.constexpr, THRESHOLD: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(tile_expert + program * ROWS // TILE) < 0:
        return
    row = program * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (tl.load(source + row) >= 0)[:, None] & (column < WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(summed + offsets, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(normed_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + row)[:, None]
    if CENTRED:
        x -= tl.load(means + row)[:, None]
    x = tl.where(inside, x * scale, 0.0)
    along = tl.sum(dy * x, 1)[:, None] / WIDTH
    dx = dy - x * along
    if CENTRED:
        dx -= tl.sum(dy, 1)[:, None] / WIDTH
    dx *= scale
    if summed_gradient is not None:
        dx += tl.load(summed_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
    dx = tl.where(inside, dx, 0.0)
    tl.store(gradient + offsets, dx.to(gradient.dtype.element_ty), mask=column < WIDTH)
    if THRESHOLD:
        dx = tl.where(kept(seed, offsets, THRESHOLD), dx * keep_scale, 0.0)
        tl.store(delta_gradient + offsets, dx.to(delta_gradient.dtype.element_ty), mask=column < WIDTH)


@dataclass(frozen=True)
class Norm:
    """How rows are normalised after something, which may be dropped by chance, was added to them.

    `normed_slot` is of the layer that reads them normalised, `delta_slot` of the one that made what is added. The
    gradient of the stream is left in `deferred`, if that is there. What is not wanted at once is made on `side`.
    """

    eps: float
    centred: bool
    dropout: float = 0.0
    seed: Tensor | None = None
    normed_slot: GroupedGradientSlot | None = None
    delta_slot: GroupedGradientSlot | None = None
    deferred: DeferredGradient | None = None
    side: SideStream | None = field(default_factory=current_side_stream, init=False)

    @property
    def keep_scale(self) -> float:
        return 1 / (1 - self.dropout)


class Normed(NamedTuple):
    """Rows with what was added [R, width], the same normalised, their means, or None, and scales [R]."""

    summed: Tensor
    rows: Tensor
    means: Tensor | None
    scales: Tensor

    @staticmethod
    def empty(stream: Tensor, permutation: Permutation, norm: Norm) -> "Normed":
        summed = stream.new_empty(permutation.rows, stream.shape[1])
        rows = torch.empty_like(summed) if norm.normed_slot is None else norm.normed_slot.input
        scales = torch.empty(permutation.rows, dtype=torch.float32, device=stream.device)
        return Normed(summed, rows, torch.empty_like(scales) if norm.centred else None, scales)


class AddNormRows(torch.autograd.Function):
    """stream [N, width], delta [R, width] -> each row's token plus (dropped) delta, and that normalised, [R, width].

    Gradients that come back are zero in padding rows, and so are those that are made.
    """

    @staticmethod
    def forward(ctx: Any, stream: Tensor, delta: Tensor, permutation: Permutation, norm: Norm) -> tuple[Tensor, Tensor]:
        made, width = Normed.empty(stream, permutation, norm), stream.shape[1]
        tile = _tile(width, permutation)
        _rows_forward[(permutation.rows // tile["ROWS"],)](
            stream, delta, permutation.source, permutation.tile_expert, norm.seed, *made, norm.eps, norm.keep_scale,
            width, norm.centred, threshold(norm.dropout), permutation.tile, **tile,
        )  # fmt: skip
        ctx.save_for_backward(made.summed, made.means, made.scales)
        ctx.permutation, ctx.norm = permutation, norm
        ctx.set_materialize_grads(False)
        return made.summed, made.rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, summed_gradient: Tensor | None, normed_gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = rows_gradients(summed_gradient, normed_gradient, ctx.saved_tensors, ctx.permutation, ctx.norm)
        return *gradients, None, None


def rows_gradients(
    summed_gradient: Tensor | None,
    normed_gradient: Tensor,
    saved: Sequence[Any],
    permutation: Permutation,
    norm: Norm,
) -> tuple[Tensor | None, Tensor]:
    """Of the stream, unless it is deferred, and of what was added; `saved` are the summed rows, means and scales."""
    summed, means, scales = saved
    width = summed.shape[1]
    delta_gradient = torch.empty_like(summed) if norm.delta_slot is None else norm.delta_slot.gradient
    gradient = torch.empty_like(summed) if norm.dropout else delta_gradient
    summed_gradient = None if summed_gradient is None else summed_gradient.contiguous()
    tile = _tile(width, permutation)
    _rows_backward[(permutation.rows // tile["ROWS"],)](
        normed_gradient.contiguous(), summed_gradient, summed, permutation.source, permutation.tile_expert, norm.seed,
        means, scales, gradient, delta_gradient, norm.keep_scale,
        width, norm.centred, threshold(norm.dropout), permutation.tile, **tile,
    )  # fmt: skip
    if norm.deferred is None:
        return summed_rows(gradient, permutation), delta_gradient
    with on_side(norm.side, gradient, priority=True):
        deferred = summed_rows(gradient, permutation)
    norm.deferred.write(deferred, norm.side)
    return None, delta_gradient


def _tile(width: int, permutation: Permutation) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"ROWS": min(permutation.tile, max(1, NUMBERS // columns)), "COLUMNS": columns, "num_warps": WARPS}


def plain_add_norm_rows(
    stream: Tensor, delta: Tensor, permutation: Permutation, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """The reference, in torch's operations."""
    real = (permutation.source >= 0)[:, None]
    summed = torch.where(real, stream[permutation.source.clamp_min(0).long()] + delta, 0.0)
    shape = summed.shape[1:]
    return summed, F.layer_norm(summed, shape, eps=eps) if centred else F.rms_norm(summed, shape, eps=eps)
