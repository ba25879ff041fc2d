"""What a block adds to the rows of its tokens, and their normalisation: one pass over memory forward and one backward.

Rows are sorted by block; each begins as its token's stream. The norm has no scale of its own here: the product that
reads it has it in its weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused_chance import kept, threshold
from .fused_mix import summed_rows
from .fused_placing import Placement
from .grouped_stacks import GroupedPlace

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS, WARPS = 4096, 4
"""Numbers that a program works on."""


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
    place = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(stream + token.to(tl.int64)[:, None] * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
    if THRESHOLD:
        y = tl.where(kept(seed, place, THRESHOLD), y * keep_scale, 0.0)
    rounded = (x + y).to(summed.dtype.element_ty)
    tl.store(summed + place, rounded, mask=column < WIDTH)
    x = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / WIDTH
        tl.store(means + row, mean)
        x = tl.where(inside, x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
    tl.store(scales + row, scale)
    tl.store(normed + place, (x * scale[:, None]).to(normed.dtype.element_ty), mask=column < WIDTH)


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
    place = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(summed + place, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(normed_gradient + place, mask=inside, other=0.0).to(tl.float32)
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
        dx += tl.load(summed_gradient + place, mask=inside, other=0.0).to(tl.float32)
    dx = tl.where(inside, dx, 0.0)
    tl.store(gradient + place, dx.to(gradient.dtype.element_ty), mask=column < WIDTH)
    if THRESHOLD:
        dx = tl.where(kept(seed, place, THRESHOLD), dx * keep_scale, 0.0)
        tl.store(delta_gradient + place, dx.to(delta_gradient.dtype.element_ty), mask=column < WIDTH)


class AddNormRows(torch.autograd.Function):
    """stream [N, width], delta [R, width] -> each row's token plus (dropped) delta, and that normalised, [R, width].

    Gradients that come back are zero in padding rows, and so are those that are made. `normed_place` is of the layer
    that reads the normalised rows, `delta_place` of the one that made delta.
    """

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        delta: Tensor,
        placement: Placement,
        eps: float,
        centred: bool,
        dropout: float,
        seed: Tensor | None,
        normed_place: GroupedPlace | None = None,
        delta_place: GroupedPlace | None = None,
    ) -> tuple[Tensor, Tensor]:
        width = stream.shape[1]
        summed = torch.empty_like(delta)
        normed = torch.empty_like(delta) if normed_place is None else normed_place.input
        scales = torch.empty(placement.rows, dtype=torch.float32, device=stream.device)
        means = torch.empty_like(scales) if centred else None
        bound, keep_scale = threshold(dropout), 1 / (1 - dropout)
        tile = _tile(width, placement)
        _rows_forward[(placement.rows // tile["ROWS"],)](
            stream, delta, placement.source, placement.tile_expert, seed, summed, normed, means, scales, eps,
            keep_scale, width, centred, bound, placement.tile, **tile,
        )  # fmt: skip
        ctx.save_for_backward(summed, means, scales, seed)
        ctx.placement, ctx.centred, ctx.threshold, ctx.keep_scale = placement, centred, bound, keep_scale
        ctx.delta_place = delta_place
        ctx.set_materialize_grads(False)
        return summed, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, summed_gradient: Tensor | None, normed_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (summed, means, scales, seed), placement = ctx.saved_tensors, ctx.placement
        width = summed.shape[1]
        delta_gradient = torch.empty_like(summed) if ctx.delta_place is None else ctx.delta_place.gradient
        gradient = torch.empty_like(summed) if ctx.threshold else delta_gradient
        summed_gradient = None if summed_gradient is None else summed_gradient.contiguous()
        tile = _tile(width, placement)
        _rows_backward[(placement.rows // tile["ROWS"],)](
            normed_gradient.contiguous(), summed_gradient, summed, placement.source, placement.tile_expert, seed,
            means, scales, gradient, delta_gradient, ctx.keep_scale,
            width, ctx.centred, ctx.threshold, placement.tile, **tile,
        )  # fmt: skip
        return summed_rows(gradient, placement), delta_gradient, *[None] * 7


def _tile(width: int, placement: Placement) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"ROWS": min(placement.tile, max(1, NUMBERS // columns)), "COLUMNS": columns, "num_warps": WARPS}


def plain_add_norm_rows(
    stream: Tensor, delta: Tensor, placement: Placement, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """The reference, in torch's operations."""
    real = (placement.source >= 0)[:, None]
    summed = torch.where(real, stream[placement.source.clamp_min(0).long()] + delta, 0.0)
    shape = summed.shape[1:]
    return summed, F.layer_norm(summed, shape, eps=eps) if centred else F.rms_norm(summed, shape, eps=eps)
