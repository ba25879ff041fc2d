"""Weights of blocks side by side, with the scale and bias of the norm before them inside: one product serves all blocks.

A norm's output times a matrix is the plain normalised stream times the matrix with its rows scaled. So the blocks of a
parallel layer, which read one stream by norms of their own, read one normalised stream. Layers of one shape are folded
together, in a few operations for all of them. The reference is the norm followed by the product.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .aside import Aside, beside
from .fused_linear import product
from .tuned_products import tuned_product


@dataclass
class Bank:
    """Matrices of some blocks [member, in, out] and their biases, with the norm that they read."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    """[member, in], of the norm."""
    shift: Tensor | None = None
    """[member, in], of the norm."""


@dataclass
class Folded:
    """One layer's matrices as a product reads them."""

    weight: Tensor
    """Where the gradient goes; its numbers are not read."""
    copy: Tensor
    """[member, in, out], or [in, member * out] side by side."""
    bias: Tensor | None
    """[member, out], or [member * out], in float32."""


class Fold(torch.autograd.Function):
    """The parts of layers of one shape, [weights..., biases..., scales..., shifts...], each of these given or not
    -> handles for the gradients of all layers, their biases, and narrow copies of all weights.
    """

    @staticmethod
    def forward(
        ctx: Any, layers: int, given: tuple[bool, ...], wide: bool, dtype: torch.dtype, aside: Aside | None,
        *parts: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weight, bias, scale, shift = _stacked(layers, given, parts)
        assert weight is not None
        read_LEIO = weight.transpose(1, 2) if wide else weight
        copy = torch.empty(read_LEIO.shape, dtype=dtype, device=weight.device)
        if scale is None:
            copy.copy_(read_LEIO)
        else:
            torch.mul(read_LEIO, (scale.transpose(1, 2) if wide else scale)[..., None], out=copy)
        if shift is not None:
            moved = (shift[:, :, None] @ weight)[:, :, 0]
            bias = moved if bias is None else moved + bias
        ctx.save_for_backward(weight, scale, shift)
        ctx.given, ctx.wide, ctx.aside, ctx.biased = given, wide, aside, bias is not None
        copy = copy.flatten(2) if wide else copy
        # Nobody reads a handle: it is where the gradient of a folded matrix comes back, in the wide type.
        handles = torch.empty(copy.shape, dtype=weight.dtype, device=weight.device).unbind()
        ctx.mark_non_differentiable(copy)
        biases = () if bias is None else (bias.flatten(1) if wide else bias).unbind()
        return copy, *(handle.data for handle in handles), *(vector.data.clone() for vector in biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.aside is not None:
            ctx.aside.join()  # the gradients were made there
        weight, scale, shift = ctx.saved_tensors
        layers = len(weight)
        gradient, shape = torch.stack(gradients[:layers]), weight.shape
        if ctx.wide:
            gradient = gradient.unflatten(2, (shape[1], shape[3])).transpose(1, 2)
        bias_gradient = torch.stack(gradients[layers:]).view(layers, shape[1], shape[3]) if ctx.biased else None
        weight_gradient, scale_gradient, shift_gradient = torch.empty_like(weight), None, None
        if scale is None:
            weight_gradient.copy_(gradient)
        else:
            torch.mul(gradient, scale[..., None], out=weight_gradient)
            scale_gradient = (gradient * weight).sum(-1)
        if shift is not None and bias_gradient is not None:
            shift_gradient = (weight @ bias_gradient[..., None])[..., 0]
            weight_gradient.addcmul_(shift[..., None], bias_gradient[:, :, None])
        made = (weight_gradient, bias_gradient, scale_gradient, shift_gradient)
        found: list[Tensor | None] = []
        for part, there in zip(made, ctx.given, strict=True):
            if there:
                assert part is not None
                found += [one.data for one in part.unbind()]
        return *[None] * 5, *found


def _stacked(layers: int, given: tuple[bool, ...], parts: tuple[Tensor, ...]) -> list[Tensor | None]:
    rest = list(parts)
    found: list[Tensor | None] = []
    for there in given:
        found.append(torch.stack(rest[:layers]) if there else None)
        rest = rest[layers:] if there else rest
    return found


def folded(banks: list[Bank], wide: bool, dtype: torch.dtype, aside: Aside | None) -> list[Folded]:
    """Banks of one shape; `wide` puts the members of each side by side. Gradients may be made aside."""
    names, layers = ("weight", "bias", "scale", "shift"), len(banks)
    given = tuple(getattr(banks[0], name) is not None for name in names)
    parts = [getattr(bank, name) for name, there in zip(names, given, strict=True) if there for bank in banks]
    copy, *made = Fold.apply(layers, given, wide, dtype, aside, *parts)
    biases = made[layers:] or [None] * layers
    return [Folded(*parts) for parts in zip(made[:layers], copy.unbind(), biases, strict=True)]


class WideLinear(torch.autograd.Function):
    """rows [rows, in], weight [in, out], its copy, a bias [out] or None -> [rows, out]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, copy: Tensor, bias: Tensor | None, aside: Aside | None
    ) -> Tensor:
        ctx.save_for_backward(rows, copy)
        ctx.aside, ctx.wide = aside, weight.dtype
        return tuned_product(rows, copy, bias=None if bias is None else bias.to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, copy = ctx.saved_tensors
        needs_rows, _, _, needs_bias, _ = ctx.needs_input_grad
        with beside(ctx.aside, rows, gradient):
            weight_gradient = product(rows.t(), gradient, ctx.wide)
            bias_gradient = gradient.sum(0, dtype=torch.float32) if needs_bias else None
        rows_gradient = tuned_product(gradient, copy, transposed=True) if needs_rows else None
        return rows_gradient, weight_gradient, None, bias_gradient, None
