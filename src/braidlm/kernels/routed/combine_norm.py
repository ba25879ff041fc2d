"""Adding experts' weighted sum to the stream and normalising it: `combine` and `AddNorm` in one pass over memory."""

from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.dropout import apply_dropout, threshold
from braidlm.kernels.ops.launch import row_tile
from braidlm.kernels.ops.norm import AddNorm, normalised, stored, tile_of_program
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.routed.combine import combine, combined_rows, store_row_weights
from braidlm.kernels.routed.permutation import Permutation

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
    """`AddNorm` where delta is not computed yet: it stands for the sum that `uncombined` describes."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        delta: Tensor,
        delta_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        sums: ColumnSums,
        normed_slot: GradientSlot | None,
        delta_slot: GradientSlot | None,
        dropout: float,
        seed: Tensor | None,
        uncombined: UncombinedSum,
    ) -> tuple[Tensor, Tensor]:
        (rows, width), (experts_rows, weights, permutation, base, row_weights) = stream.shape, uncombined.take()
        summed = torch.empty_like(stream)
        normed = torch.empty_like(stream) if normed_slot is None else normed_slot.input
        rstds = torch.empty(rows, dtype=torch.float32, device=stream.device)
        means = torch.empty_like(rstds) if centred else None
        tile = row_tile(width)
        _combine_norm_forward[(triton.cdiv(rows, tile["ROWS"]),)](
            stream, experts_rows, weights, permutation.row_of_choice, base, row_weights, delta_bias, weight, bias,
            seed, summed, normed, means, rstds, rows, width, eps, 1 / (1 - dropout), weights.shape[1], centred,
            threshold(dropout), **tile,
        )  # fmt: skip
        AddNorm.keep(
            ctx, summed, weight, bias, means, rstds, seed, dropout, centred, sums, delta, delta_bias, delta_slot
        )
        return summed, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *AddNorm.backward(ctx, *gradients), None
