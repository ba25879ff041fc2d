"""The way out of a block of a mixture of depths: its rows return to their tokens, and the others stay as they were.

One pass over memory forward and one backward. What the block's last part adds is added here.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.depths.enter import Choice
from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.dropout import threshold
from braidlm.kernels.ops.launch import row_tile
from braidlm.kernels.ops.norm import addition, store_gradients, stored, tile_of_program
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import SideStream, current_side_stream, on_side


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    stream, output, delta, delta_bias, scores, places, seed, finished, merged, rows, width, keep_scale,
    THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, column_mask, mask, offsets = tile_of_program(rows, width, ROWS, COLUMNS)
    place = tl.load(places + row, mask=row < rows, other=-1)
    entered = (place >= 0)[:, None] & column_mask
    inner_offsets = place.to(tl.int64)[:, None] * width + column
    x = tl.load(stream + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(output + inner_offsets, mask=entered, other=0.0).to(tl.float32)
    if delta is not None:
        y += addition(delta, delta_bias, seed, inner_offsets, entered, column, column_mask, keep_scale, THRESHOLD)
        y = stored(y, finished, inner_offsets, entered)  # the backward pass reads it again
    weight = tl.sigmoid(tl.load(scores + place, mask=place >= 0, other=0.0))[:, None]
    x = tl.where(entered, x + weight * (y - x), x)
    tl.store(merged + offsets, x.to(merged.dtype.element_ty), mask=mask)


@triton.jit
def _merge_backward(  # type: ignore[no-untyped-def]
    merged_gradient, inside, finished, scores, index, seed, gradient, delta_gradient, score_gradient,
    rows, time, count, width, keep_scale, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    token = (row // count) * time + tl.load(index + row, mask=row_mask, other=0)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = row_mask[:, None] & (column < width)
    offsets = row.to(tl.int64)[:, None] * width + column
    upstream = tl.load(merged_gradient + token.to(tl.int64)[:, None] * width + column, mask=mask, other=0.0)
    upstream = upstream.to(tl.float32)
    changed = tl.load(finished + offsets, mask=mask, other=0.0).to(tl.float32)
    changed -= tl.load(inside + offsets, mask=mask, other=0.0).to(tl.float32)
    score = tl.load(scores + row, mask=row_mask, other=0.0)
    weight = tl.sigmoid(score)
    ds = tl.sum(upstream * changed, 1) * weight * tl.sigmoid(-score)
    tl.store(score_gradient + row, ds, mask=row_mask)
    dy = upstream * weight[:, None]
    store_gradients(dy, gradient, delta_gradient, seed, offsets, mask, keep_scale, THRESHOLD)


@dataclass(frozen=True)
class MergeConfig:
    """What the way out of a block needs to know beside its tensors.

    `delta_slot` belongs to the layer that computed delta.
    """

    choice: Choice
    delta_slot: GradientSlot | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    side: SideStream | None = field(default_factory=current_side_stream, init=False)


class Merge(torch.autograd.Function):
    """stream [tokens, width], the rows that entered, their output, delta [rows, width] (or None), its bias [width] (or
    None), scores [rows] -> the stream, in which the block's change of each row is added with the sigmoid of its score.

    What is taken away from the rows that entered has its gradient in `Enter`, which writes that of the stream anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        inside: Tensor,
        output: Tensor,
        delta: Tensor | None,
        delta_bias: Tensor | None,
        scores: Tensor,
        config: MergeConfig,
    ) -> Tensor:
        (tokens, width), tile = stream.shape, row_tile(stream.shape[1])
        merged = torch.empty_like(stream)
        finished = output if delta is None else torch.empty_like(output)
        _merge[(triton.cdiv(tokens, tile["ROWS"]),)](
            stream, output, delta, delta_bias, scores, config.choice.place_BT, config.seed, finished, merged,
            tokens, width, 1 / (1 - config.dropout), threshold(config.dropout), **tile,
        )  # fmt: skip
        ctx.save_for_backward(inside, finished, scores, config.seed)
        ctx.config, ctx.adds = config, delta is not None
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, merged_gradient: Tensor) -> tuple[Tensor | None, ...]:
        inside, finished, scores, seed = ctx.saved_tensors
        config: MergeConfig = ctx.config
        (rows, width), (batch, count) = inside.shape, config.choice.index_BK.shape
        tile, merged_gradient = row_tile(width), merged_gradient.contiguous()
        delta_gradient = torch.empty_like(inside) if config.delta_slot is None else config.delta_slot.gradient
        gradient = torch.empty_like(inside) if config.dropout else delta_gradient
        score_gradient = torch.empty_like(scores)
        _merge_backward[(triton.cdiv(rows, tile["ROWS"]),)](
            merged_gradient, inside, finished, scores, config.choice.index_BK, seed, gradient, delta_gradient,
            score_gradient, rows, len(merged_gradient) // batch, count, width, 1 / (1 - config.dropout),
            threshold(config.dropout), **tile,
        )  # fmt: skip
        bias_gradient = None
        if ctx.needs_input_grad[4]:
            with on_side(config.side, delta_gradient, priority=True):
                bias_gradient = delta_gradient.sum(0, dtype=torch.float32)
        return (
            merged_gradient, None, gradient, delta_gradient if ctx.adds else None, bias_gradient, score_gradient, None
        )  # fmt: skip


def plain_merge(
    stream: Tensor,
    inside: Tensor,
    output: Tensor,
    delta: Tensor | None,
    delta_bias: Tensor | None,
    scores: Tensor,
    token_R: Tensor,
) -> Tensor:
    """The reference, in torch's operations; here the rows that entered have their whole gradient."""
    if delta is not None:
        output = output + (delta if delta_bias is None else delta + delta_bias)
    return stream.index_add(0, token_R, (output - inside) * scores.sigmoid()[:, None])
