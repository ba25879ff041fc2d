"""Linear and feed-forward layers with weights for each expert, on rows sorted by expert.

They read low-precision copies of their weights and compute float32 weight gradients, on the side stream if there is
one. Upstream gradients must be zero in the padding rows of used tiles.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.activation import plain_activation
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse, dropout_into
from braidlm.kernels.routed.combine import summed_rows
from braidlm.kernels.routed.grouped.products import grouped_backward, grouped_forward, plain_grouped
from braidlm.kernels.routed.grouped.sums import expert_sums
from braidlm.kernels.routed.grouped.weights import grouped_weight_gradient
from braidlm.kernels.routed.permutation import Permutation
from braidlm.kernels.side_stream import current_side_stream, on_side, use_side_stream


class GroupedLinear(Function):
    """rows [R, in], or tokens [N, in] to be gathered, through the layer of each row's expert -> [R, out].

    weight [E, in, out], its cast, a bias [E, out] or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        cast: Tensor,
        bias: Tensor | None,
        permutation: Permutation,
        gather: bool,
        slot: GradientSlot | None = None,
    ) -> Tensor:
        check_slot(slot, rows)
        ctx.save_for_backward(rows, cast)
        ctx.permutation, ctx.gather, ctx.side, ctx.slot = permutation, gather, current_side_stream(), slot
        return grouped_forward(rows, cast, permutation, bias, gather)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, cast), permutation = ctx.saved_tensors, ctx.permutation
        needs_rows, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        gradient, rows_gradient = gradient.contiguous(), None
        weight_gradients: tuple[Tensor | None, Tensor | None] = (None, None)
        if needs_weight or needs_bias:
            with use_side_stream(ctx.side):
                weight_gradients = parameter_gradients(ctx.slot, rows, gradient, permutation, ctx.gather, needs_bias)
        if needs_rows:
            rows_gradient = gradient_of_rows(gradient, cast, permutation, ctx.gather)
        return rows_gradient, weight_gradients[0], None, weight_gradients[1], *[None] * 3


class GroupedFeed(Function):
    """rows [R, in], or tokens [N, in] to be gathered, through the feed-forward part of each row's expert -> [R, out].

    up weight [E, in, hidden] (gated: [E, in, 2 hidden], gate and up concatenated), its cast, a bias as wide or None;
    out weight [E, hidden, out], its cast, a bias [E, out] or None. `inner_dropout` is of the activation. With `base`
    [R, out], the output is added to it after dropout.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        up_weight: Tensor,
        up_cast: Tensor,
        up_bias: Tensor | None,
        out_weight: Tensor,
        out_cast: Tensor,
        out_bias: Tensor | None,
        base: Tensor | None,
        permutation: Permutation,
        kind: str,
        gated: bool,
        gather: bool,
        dropout: DropoutUse = NO_DROPOUT,
        inner_dropout: DropoutUse = NO_DROPOUT,
        up_slot: GradientSlot | None = None,
        out_slot: GradientSlot | None = None,
    ) -> Tensor:
        check_slot(up_slot, rows)
        target = None if out_slot is None else out_slot.input
        value, inner = grouped_forward(
            rows, up_cast, permutation, up_bias, gather, kind, gated, dropout=inner_dropout, value=target,
            keep_inner=any(ctx.needs_input_grad),
        )  # fmt: skip
        ctx.save_for_backward(rows, inner, value, up_cast, out_cast)
        ctx.permutation, ctx.kind, ctx.gated, ctx.gather = permutation, kind, gated, gather
        ctx.side, ctx.has_base, ctx.up_slot, ctx.out_slot = current_side_stream(), base is not None, up_slot, out_slot
        ctx.dropout, ctx.inner_dropout = dropout, inner_dropout
        return grouped_forward(value, out_cast, permutation, out_bias, base=base, dropout=dropout)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, inner, value, up_cast, out_cast), permutation = ctx.saved_tensors, ctx.permutation
        needs_rows, needs_up, _, needs_bias, needs_out, _, needs_out_bias = ctx.needs_input_grad[:7]
        gradient, rows_gradient = gradient.contiguous(), None
        base_gradient = gradient if ctx.has_base else None
        if ctx.dropout.probability:
            target = torch.empty_like(gradient) if ctx.out_slot is None else ctx.out_slot.gradient
            gradient = dropout_into(gradient, ctx.dropout, target)
        up_gradient = bias_gradient = None
        out_gradients: tuple[Tensor | None, Tensor | None] = (None, None)
        if needs_out or needs_out_bias:
            with use_side_stream(ctx.side):
                out_gradients = parameter_gradients(ctx.out_slot, value, gradient, permutation, False, needs_out_bias)
        target = None if ctx.up_slot is None else ctx.up_slot.gradient
        inner_gradient, sums = grouped_backward(
            gradient, out_cast, permutation, inner, ctx.kind, ctx.gated, out=target, summed=needs_bias,
            dropout=ctx.inner_dropout,
        )  # fmt: skip
        if needs_up:
            with use_side_stream(ctx.side):
                up_gradient, _ = parameter_gradients(ctx.up_slot, rows, inner_gradient, permutation, ctx.gather, False)
        if sums is not None:
            with on_side(ctx.side, sums, permutation.expert_offsets, priority=True):
                bias_gradient = expert_sums(sums, permutation)
        if needs_rows:
            rows_gradient = gradient_of_rows(inner_gradient, up_cast, permutation, ctx.gather)
        gradients = (rows_gradient, up_gradient, None, bias_gradient, out_gradients[0], None, out_gradients[1])
        return *gradients, base_gradient, *[None] * 8


def check_slot(slot: GradientSlot | None, rows: Tensor) -> None:
    assert slot is None or slot.input.data_ptr() == rows.data_ptr(), "the rows were not written into the slot"


def parameter_gradients(
    slot: GradientSlot | None,
    rows: Tensor,
    gradient: Tensor,
    permutation: Permutation,
    gather: bool,
    bias: bool,
) -> tuple[Tensor, Tensor | None]:
    if slot is not None:
        return slot.submit(gradient, permutation)
    with on_side(current_side_stream(), rows, gradient, permutation.source, permutation.expert_offsets):
        return grouped_weight_gradient(rows, gradient, permutation, "inputs" if gather else None, bias)


def gradient_of_rows(gradient: Tensor, cast: Tensor, permutation: Permutation, gather: bool) -> Tensor:
    rows_gradient, _ = grouped_backward(gradient, cast, permutation)
    return summed_rows(rows_gradient, permutation) if gather else rows_gradient


def plain_grouped_feed(
    rows: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    base: Tensor | None,
    permutation: Permutation,
    kind: str,
    gated: bool,
    gather: bool,
    factors: Tensor | None = None,
) -> Tensor:
    """The reference of `GroupedFeed`, in torch's operations; dropout multiplies activations by factors [R, hidden]."""
    inner = plain_grouped(rows, up_weight, permutation, up_bias, gather)
    value = plain_activation(inner, None, kind, gated)
    out = plain_grouped(value if factors is None else value * factors, out_weight, permutation, out_bias)
    return out if base is None else out + base
