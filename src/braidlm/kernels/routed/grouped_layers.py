"""Linear and feed-forward layers with weights for each expert, on rows sorted by expert.

They read narrow copies of their weights and write the gradients of the wide ones, these on a second stream if there is
one. Who hands a gradient to them has zeros in its padding rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from braidlm.kernels.ops.activation import plain_activation
from braidlm.kernels.ops.dropout import dropped
from braidlm.kernels.routed.grouped_products import grouped_backward, grouped_forward, plain_grouped
from braidlm.kernels.routed.grouped_stacks import GroupedPlace
from braidlm.kernels.routed.grouped_weights import expert_sums, grouped_weight_gradient
from braidlm.kernels.routed.mix import summed_rows
from braidlm.kernels.routed.placement import Placement
from braidlm.kernels.side_stream import Aside, beside


class GroupedLinear(Function):
    """rows [R, in], or tokens [N, in] to be gathered, through the layer of each row's expert -> [R, out].

    weight [E, in, out], its copy, a bias [E, out] or None. The gradient that comes back must be zero in the padding
    rows of used tiles.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        copy: Tensor,
        bias: Tensor | None,
        placement: Placement,
        gather: bool,
        aside: Aside | None,
        place: GroupedPlace | None = None,
    ) -> Tensor:
        check_place(place, rows)
        ctx.save_for_backward(rows, copy)
        ctx.placement, ctx.gather, ctx.aside, ctx.place = placement, gather, aside, place
        return grouped_forward(rows, copy, placement, bias, gather)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, copy), placement = ctx.saved_tensors, ctx.placement
        needs_rows, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        gradient, rows_gradient = gradient.contiguous(), None
        weight_gradients: tuple[Tensor | None, Tensor | None] = (None, None)
        if needs_weight or needs_bias:
            weight_gradients = parameter_gradients(
                ctx.place, ctx.aside, rows, gradient, placement, ctx.gather, needs_bias
            )
        if needs_rows:
            rows_gradient = gradient_of_rows(gradient, copy, placement, ctx.gather)
        return rows_gradient, weight_gradients[0], None, weight_gradients[1], *[None] * 4


class GroupedFeed(Function):
    """rows [R, in], or tokens [N, in] to be gathered, through the feed-forward part of each row's expert -> [R, out].

    up weight [E, in, hidden] (gated: [E, in, 2 hidden], gate and value side by side), its copy, a bias as wide or None;
    out weight [E, hidden, out], its copy, a bias [E, out] or None. What comes out may be dropped by chance and added to
    `base` [R, out]. The gradient that comes back must be zero in the padding rows of used tiles.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        up_weight: Tensor,
        up_copy: Tensor,
        up_bias: Tensor | None,
        out_weight: Tensor,
        out_copy: Tensor,
        out_bias: Tensor | None,
        base: Tensor | None,
        placement: Placement,
        kind: str,
        gated: bool,
        gather: bool,
        aside: Aside | None,
        dropout: float = 0.0,
        seed: Tensor | None = None,
        up_place: GroupedPlace | None = None,
        out_place: GroupedPlace | None = None,
    ) -> Tensor:
        check_place(up_place, rows)
        to = None if out_place is None else out_place.input
        value, inner = grouped_forward(rows, up_copy, placement, up_bias, gather, kind, gated, value=to)
        ctx.save_for_backward(rows, inner, value, up_copy, out_copy, seed)
        ctx.placement, ctx.kind, ctx.gated, ctx.gather, ctx.aside = placement, kind, gated, gather, aside
        ctx.dropout, ctx.based, ctx.up_place, ctx.out_place = dropout, base is not None, up_place, out_place
        return grouped_forward(value, out_copy, placement, out_bias, base=base, dropout=dropout, seed=seed)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows, inner, value, up_copy, out_copy, seed), placement = ctx.saved_tensors, ctx.placement
        needs_rows, needs_up, _, needs_bias, needs_out, _, needs_out_bias = ctx.needs_input_grad[:7]
        gradient, rows_gradient = gradient.contiguous(), None
        base_gradient = gradient if ctx.based else None
        if ctx.dropout:
            to = torch.empty_like(gradient) if ctx.out_place is None else ctx.out_place.gradient
            gradient = dropped(gradient, ctx.dropout, seed, to)
        up_gradient = bias_gradient = None
        out_gradients: tuple[Tensor | None, Tensor | None] = (None, None)
        if needs_out or needs_out_bias:
            out_gradients = parameter_gradients(
                ctx.out_place, ctx.aside, value, gradient, placement, False, needs_out_bias
            )
        to = None if ctx.up_place is None else ctx.up_place.gradient
        inner_gradient, sums = grouped_backward(
            gradient, out_copy, placement, inner, ctx.kind, ctx.gated, made=to, summed=needs_bias
        )
        if needs_up:
            up_gradient, _ = parameter_gradients(
                ctx.up_place, ctx.aside, rows, inner_gradient, placement, ctx.gather, False
            )
        if sums is not None:
            with beside(ctx.aside, sums, placement.starts, urgent=True):
                bias_gradient = expert_sums(sums, placement)
        if needs_rows:
            rows_gradient = gradient_of_rows(inner_gradient, up_copy, placement, ctx.gather)
        made = (rows_gradient, up_gradient, None, bias_gradient, out_gradients[0], None, out_gradients[1])
        return *made, base_gradient, *[None] * 9


def check_place(place: GroupedPlace | None, rows: Tensor) -> None:
    assert place is None or place.input.data_ptr() == rows.data_ptr(), "who made the rows had to put them there"


def parameter_gradients(
    place: GroupedPlace | None,
    aside: Aside | None,
    rows: Tensor,
    gradient: Tensor,
    placement: Placement,
    gather: bool,
    bias: bool,
) -> tuple[Tensor, Tensor | None]:
    if place is not None:
        return place.deliver(gradient, placement)
    with beside(aside, rows, gradient, placement.source, placement.starts):
        return grouped_weight_gradient(rows, gradient, placement, gather, bias)


def gradient_of_rows(gradient: Tensor, copy: Tensor, placement: Placement, gather: bool) -> Tensor:
    made, _ = grouped_backward(gradient, copy, placement)
    return summed_rows(made, placement) if gather else made


def plain_grouped_feed(
    rows: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    base: Tensor | None,
    placement: Placement,
    kind: str,
    gated: bool,
    gather: bool,
) -> Tensor:
    """The reference of `GroupedFeed`, in torch's operations."""
    inner = plain_grouped(rows, up_weight, placement, up_bias, gather)
    made = plain_grouped(plain_activation(inner, None, kind, gated), out_weight, placement, out_bias)
    return made if base is None else made + base
