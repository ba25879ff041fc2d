"""Each token's weighted sum of its rows, which are sorted by expert: one pass over memory forward and one backward.

The backward pass goes over the sorted rows and writes zeros into padding. The next norm's kernel may compute the sum.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.dropout import apply_dropout
from braidlm.kernels.ops.launch import row_tile
from braidlm.kernels.ops.norm import AddNorm, normalised, stored, tile_of_program
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.side_stream import DeferredGradient

ELEMENTS, WARPS = 4096, 4
"""Elements of a program's block, and its warps."""


@triton.jit
def combined_rows(  # type: ignore[no-untyped-def]
    rows, weights, row_of_choice, token, token_mask, mask, column, width, CHOICES: tl.constexpr
):
    """The sum of some tokens' rows, each times its weight if there are weights, in float32."""
    total = tl.zeros(mask.shape, tl.float32)
    for choice in tl.static_range(CHOICES):
        offset = token * CHOICES + choice
        row = tl.load(row_of_choice + offset, mask=token_mask, other=0).to(tl.int64)
        x = tl.load(rows + row[:, None] * width + column, mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            x *= tl.load(weights + offset, mask=token_mask, other=0.0)[:, None]
        total += x
    return total


@triton.jit
def store_row_weights(  # type: ignore[no-untyped-def]
    row_weights, weights, row_of_choice, token, token_mask, CHOICES: tl.constexpr
):
    """Store the weights of some tokens' rows, each where its row is."""
    for choice in tl.static_range(CHOICES):
        row = tl.load(row_of_choice + token * CHOICES + choice, mask=token_mask, other=0)
        weight = tl.load(weights + token * CHOICES + choice, mask=token_mask, other=0.0)
        tl.store(row_weights + row, weight, mask=token_mask)


@triton.jit
def _combine_forward(  # type: ignore[no-untyped-def]
    rows, weights, row_of_choice, base, out, row_weights, tokens,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token_mask = token < tokens
    column = tl.arange(0, COLUMNS)[None, :]
    mask = token_mask[:, None] & (column < WIDTH)
    total = combined_rows(rows, weights, row_of_choice, token, token_mask, mask, column, WIDTH, CHOICES)
    if row_weights is not None:
        store_row_weights(row_weights, weights, row_of_choice, token, token_mask, CHOICES)
    offsets = token.to(tl.int64)[:, None] * WIDTH + column
    if base is not None:
        total += tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_backward(  # type: ignore[no-untyped-def]
    gradient, rows, weights, row_of_choice, source, tile_expert, rows_gradient, weights_gradient,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, PADDED_CHOICES: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if tl.load(tile_expert + program * ROWS // TILE) < 0:
        return
    row = program * ROWS + tl.arange(0, ROWS)
    token = tl.load(source + row)
    real = token >= 0
    token = tl.maximum(token, 0).to(tl.int64)
    choice = tl.arange(0, PADDED_CHOICES)[None, :]
    offset = token[:, None] * CHOICES + choice
    choice_mask = real[:, None] & (choice < CHOICES)
    choice_mask = choice_mask & (tl.load(row_of_choice + offset, mask=choice_mask, other=-1) == row[:, None])
    weight = tl.sum(tl.load(weights + offset, mask=choice_mask, other=0.0), 1)

    column = tl.arange(0, COLUMNS)[None, :]
    mask = real[:, None] & (column < WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + column
    x = tl.load(rows + offsets, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(gradient + token[:, None] * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    projection = tl.sum(x * dy, 1)[:, None] + tl.zeros([ROWS, PADDED_CHOICES], tl.float32)
    tl.store(weights_gradient + offset, projection, mask=choice_mask)
    dy *= weight[:, None]
    tl.store(rows_gradient + offsets, dy.to(rows_gradient.dtype.element_ty), mask=column < WIDTH)


class DeferredDispatch:
    """Gradients that experts' backward pass hands to that of their router, past autograd.

    Those of weights [N, K] are computed on the side stream, beside products that would else wait for them. Those of
    tokens are sorted rows [R, width] still, with the row [N, K] of each token's k-th choice: the router's kernel, which
    reads the tokens' other gradients too, adds them up.
    """

    def __init__(self) -> None:
        self.weights = DeferredGradient()
        self.rows: tuple[Tensor, Tensor] | None = None

    def add_weights(self, others: Tensor | None) -> Tensor | None:
        """The gradient of the weights, with what autograd brings from their other readers."""
        if self.weights.gradient is None:  # the loss does not depend on what the experts compute
            return others
        gradient = self.weights.read()
        return gradient if others is None else gradient + others

    def read_rows(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The gradients of rows, and the row of each choice. No reference is kept, so that they are freed at once."""
        rows, self.rows = self.rows, None
        return rows or (None, None)


class Combine(torch.autograd.Function):
    """rows [R, width], weights [N, K], the permutation -> [N, width], the sum over k of weight times row.

    In the backward pass padding rows of used tiles become zeros. `slot` belongs to the layer that computed the rows.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, permutation: Permutation, slot: GradientSlot | None = None
    ) -> Tensor:
        rows, weights = rows.contiguous(), weights.contiguous()
        ctx.save_for_backward(rows, weights)
        ctx.permutation, ctx.slot = permutation, slot
        return combine(rows, weights, permutation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        return *combine_gradients(gradient, rows, weights, ctx.permutation, ctx.slot), None, None


def combine_gradients(
    gradient: Tensor, rows: Tensor, weights: Tensor, permutation: Permutation, slot: GradientSlot | None
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights from the gradient of the tokens' sums [N, width]."""
    width, choices = rows.shape[1], weights.shape[1]
    rows_gradient = torch.empty_like(rows) if slot is None else slot.gradient
    weights_gradient = torch.empty_like(weights)
    columns, block_rows = block_shape(width)
    block_rows = min(block_rows, permutation.tile)
    _combine_backward[(permutation.rows // block_rows,)](
        gradient.contiguous(), rows, weights, permutation.row_of_choice, permutation.source, permutation.tile_expert,
        rows_gradient, weights_gradient,
        width, choices, triton.next_power_of_2(choices), permutation.tile, block_rows, columns, num_warps=WARPS,
    )  # fmt: skip
    return rows_gradient, weights_gradient


def combine(
    rows: Tensor,
    weights: Tensor | None,
    permutation: Permutation,
    base: Tensor | None = None,
    row_weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The weighted sum [N, width] of each token's rows, added to `base`; `row_weights` [R] gets each real row's.

    Without weights it is the gradient of tokens that were dispatched to several experts.
    """
    (tokens, choices), width = permutation.row_of_choice.shape, rows.shape[1]
    out = rows.new_empty(tokens, width) if out is None else out
    columns, block_rows = block_shape(width)
    _combine_forward[(triton.cdiv(tokens, block_rows),)](
        rows, weights, permutation.row_of_choice, base, out, row_weights, tokens, width, choices, block_rows, columns,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def block_shape(width: int) -> tuple[int, int]:
    """Columns and rows of a program that moves whole rows."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, ELEMENTS // columns)


def plain_combine(rows: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
    """The reference, in torch's operations."""
    return (rows[permutation.row_of_choice.long()] * weights[..., None]).sum(1)


@dataclass
class UncombinedRows:
    """A stream as sorted rows that are not combined yet; `slot` is of the layer that computed them."""

    rows: Tensor
    weights: Tensor
    permutation: Permutation
    slot: GradientSlot | None = None

    def combined(self) -> Tensor:
        """Each token's weighted sum of its rows."""
        return Combine.apply(self.rows, self.weights, self.permutation, self.slot)


SumInputs = tuple[Tensor, Tensor, Permutation, Tensor | None, Tensor | None]
"""What `combine` reads: rows, weights, the permutation, a base, and where to write the weights of rows."""


class UncombinedSum:
    """A tensor's content that is not computed yet: experts leave it here, and the next norm's kernel computes it."""

    def __init__(self) -> None:
        self.inputs: SumInputs | None = None

    def take(self) -> SumInputs:
        """What the sum is computed from. No reference is kept, so that the rows are freed at once."""
        inputs, self.inputs = self.inputs, None
        assert inputs is not None
        return inputs

    def combine_into(self, out: Tensor) -> None:
        """Compute the sum alone, unless that was done, for a reader other than a norm."""
        if self.inputs is not None:
            combine(*self.take(), out=out)


@triton.jit
def _combine_norm_forward(  # type: ignore[no-untyped-def]
    stream, combined, combine_weights, row_of_choice, base, row_weights, delta_bias, weight, bias, seed, summed,
    normed, means, rstds, rows, width, eps, keep_scale,
    CHOICES: tl.constexpr, CENTRED: tl.constexpr, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, column_mask, mask, offsets = tile_of_program(rows, width, ROWS, COLUMNS)
    x = tl.load(stream + offsets, mask=mask, other=0.0).to(tl.float32)
    added = tl.zeros([ROWS, COLUMNS], tl.float32)
    if base is not None:
        added += tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
    if delta_bias is not None:
        added += tl.load(delta_bias + column, mask=column_mask, other=0.0).to(tl.float32)
    added += combined_rows(combined, combine_weights, row_of_choice, row, row < rows, mask, column, width, CHOICES)
    x = stored(x + apply_dropout(added, seed, offsets, keep_scale, THRESHOLD), summed, offsets, mask)
    y = normalised(x, weight, bias, means, rstds, row, rows, width, eps, column, column_mask, mask, CENTRED)
    tl.store(normed + offsets, y.to(normed.dtype.element_ty), mask=mask)
    if row_weights is not None:
        store_row_weights(row_weights, combine_weights, row_of_choice, row, row < rows, CHOICES)


class CombineAddNorm(torch.autograd.Function):
    """`AddNorm` where delta is not computed yet; one more input, an `UncombinedSum`, says what delta stands for."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        *vectors, config, uncombined = inputs
        (rows, width), dropout = stream.shape, config.dropout
        experts_rows, weights, permutation, base, row_weights = uncombined.take()
        outputs, tile = AddNorm.outputs(ctx, stream, *vectors, config), row_tile(width)
        _combine_norm_forward[(triton.cdiv(rows, tile["ROWS"]),)](
            stream, experts_rows, weights, permutation.row_of_choice, base, row_weights, *vectors[1:], dropout.seed,
            *outputs, rows, width, config.eps, dropout.keep_scale, weights.shape[1], config.centred, dropout.threshold,
            **tile,
        )  # fmt: skip
        return outputs[:2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *AddNorm.backward(ctx, *gradients), None
