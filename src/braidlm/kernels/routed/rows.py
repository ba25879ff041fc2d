"""Adding a block's output to its tokens' rows and normalising them: one pass over memory forward and one backward.

Rows are sorted by block, and each starts as its token's stream. The norm has no weight here: it is folded into the next
product (`ops.fold`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.dropout import keep_mask, threshold
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.combine import summed_rows
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.side_stream import DeferredGradient, SideStream, current_side_stream, on_side

ELEMENTS, WARPS = 4096, 4
"""Elements of a program's block, and its warps."""


@triton.jit
def store_normed(  # type: ignore[no-untyped-def]
    x, mask, row, offsets, column, summed, normed, means, rstds, eps, WIDTH: tl.constexpr, CENTRED: tl.constexpr
):
    """Store rows [ROWS, COLUMNS] and the same normalised; padding rows become zeros."""
    rounded = tl.where(mask, x, 0.0).to(summed.dtype.element_ty)
    tl.store(summed + offsets, rounded, mask=column < WIDTH)
    x = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / WIDTH
        tl.store(means + row, mean)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
    tl.store(rstds + row, rstd)
    tl.store(normed + offsets, (x * rstd[:, None]).to(normed.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _rows_forward(  # type: ignore[no-untyped-def]
    stream, delta, source, tile_expert, seed, summed, normed, means, rstds, eps, keep_scale,
    WIDTH: tl.constexpr, CENTRED: tl.constexpr, THRESHOLD: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(tile_expert + program * ROWS // TILE) < 0:
        return
    row = program * ROWS + tl.arange(0, ROWS)
    token = tl.load(source + row)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (token >= 0)[:, None] & (column < WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(stream + token.to(tl.int64)[:, None] * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
    if THRESHOLD:
        y = tl.where(keep_mask(seed, offsets, THRESHOLD), y * keep_scale, 0.0)
    store_normed(x + y, mask, row, offsets, column, summed, normed, means, rstds, eps, WIDTH, CENTRED)


@triton.jit
def _rows_backward(  # type: ignore[no-untyped-def]
    normed_gradient, summed_gradient, summed, source, tile_expert, seed, means, rstds, gradient, delta_gradient,
    keep_scale,
    WIDTH: tl.constexpr, CENTRED: tl.constexpr, THRESHOLD: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(tile_expert + program * ROWS // TILE) < 0:
        return
    row = program * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (tl.load(source + row) >= 0)[:, None] & (column < WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(summed + offsets, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(normed_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstds + row)[:, None]
    if CENTRED:
        x -= tl.load(means + row)[:, None]
    x = tl.where(mask, x * rstd, 0.0)
    projection = tl.sum(dy * x, 1)[:, None] / WIDTH
    dx = dy - x * projection
    if CENTRED:
        dx -= tl.sum(dy, 1)[:, None] / WIDTH
    dx *= rstd
    if summed_gradient is not None:
        dx += tl.load(summed_gradient + offsets, mask=mask, other=0.0).to(tl.float32)
    dx = tl.where(mask, dx, 0.0)
    tl.store(gradient + offsets, dx.to(gradient.dtype.element_ty), mask=column < WIDTH)
    if THRESHOLD:
        dx = tl.where(keep_mask(seed, offsets, THRESHOLD), dx * keep_scale, 0.0)
        tl.store(delta_gradient + offsets, dx.to(delta_gradient.dtype.element_ty), mask=column < WIDTH)


@dataclass(frozen=True)
class Norm:
    """Options of the norm of rows, and of the dropout of what is added before.

    `normed_slot` belongs to the layer that reads the normalised rows, `delta_slot` to the layer that computed delta.
    With `deferred`, the gradient of the stream is computed on `side` and written there.
    """

    eps: float
    centred: bool
    dropout: float = 0.0
    seed: Tensor | None = None
    normed_slot: GradientSlot | None = None
    delta_slot: GradientSlot | None = None
    deferred: DeferredGradient | None = None
    side: SideStream | None = field(default_factory=current_side_stream, init=False)

    @property
    def keep_scale(self) -> float:
        return 1 / (1 - self.dropout)


class Normed(NamedTuple):
    """Summed rows [R, width], the same normalised, their means [R] or None, and inverse standard deviations [R]."""

    summed: Tensor
    rows: Tensor
    means: Tensor | None
    rstds: Tensor

    @staticmethod
    def empty(stream: Tensor, permutation: Permutation, norm: Norm) -> "Normed":
        summed = stream.new_empty(permutation.rows, stream.shape[1])
        rows = torch.empty_like(summed) if norm.normed_slot is None else norm.normed_slot.input
        rstds = torch.empty(permutation.rows, dtype=torch.float32, device=stream.device)
        return Normed(summed, rows, torch.empty_like(rstds) if norm.centred else None, rstds)


class AddNormRows(torch.autograd.Function):
    """stream [N, width], delta [R, width] -> each row's token plus delta after dropout, and that normalised, [R,
    width].

    Upstream gradients are zero in padding rows, and so are the results.
    """

    @staticmethod
    def forward(ctx: Any, stream: Tensor, delta: Tensor, permutation: Permutation, norm: Norm) -> tuple[Tensor, Tensor]:
        outputs, width = Normed.empty(stream, permutation, norm), stream.shape[1]
        tile = _tile(width, permutation)
        _rows_forward[(permutation.rows // tile["ROWS"],)](
            stream, delta, permutation.source, permutation.tile_expert, norm.seed, *outputs, norm.eps, norm.keep_scale,
            width, norm.centred, threshold(norm.dropout), permutation.tile, **tile,
        )  # fmt: skip
        ctx.save_for_backward(outputs.summed, outputs.means, outputs.rstds)
        ctx.permutation, ctx.norm = permutation, norm
        ctx.set_materialize_grads(False)
        return outputs.summed, outputs.rows

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
    """Gradients of the stream (None if deferred) and of delta; `saved` are the summed rows, means and rstds."""
    summed, means, rstds = saved
    width = summed.shape[1]
    delta_gradient = torch.empty_like(summed) if norm.delta_slot is None else norm.delta_slot.gradient
    gradient = torch.empty_like(summed) if norm.dropout else delta_gradient
    summed_gradient = None if summed_gradient is None else summed_gradient.contiguous()
    tile = _tile(width, permutation)
    _rows_backward[(permutation.rows // tile["ROWS"],)](
        normed_gradient.contiguous(), summed_gradient, summed, permutation.source, permutation.tile_expert, norm.seed,
        means, rstds, gradient, delta_gradient, norm.keep_scale,
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
    return {"ROWS": min(permutation.tile, max(1, ELEMENTS // columns)), "COLUMNS": columns, "num_warps": WARPS}


def plain_add_norm_rows(
    stream: Tensor, delta: Tensor, permutation: Permutation, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """The reference, in torch's operations."""
    real = (permutation.source >= 0)[:, None]
    summed = torch.where(real, stream[permutation.source.clamp_min(0).long()] + delta, 0.0)
    shape = summed.shape[1:]
    return summed, F.layer_norm(summed, shape, eps=eps) if centred else F.rms_norm(summed, shape, eps=eps)
