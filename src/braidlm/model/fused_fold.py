"""Weights of blocks side by side, with the norm before them inside: one product serves all blocks of a layer.

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
from .weight_stacks import Place

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

NUMBERS, WARPS = 4096, 4
"""Numbers that a program works on."""


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
    bias_copy: Tensor | None
    """The same, as narrow as the copy."""


@triton.jit
def _fold_forward(  # type: ignore[no-untyped-def]
    weight, scale, copy, rows, inputs, members, outputs, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Rows are of [layer, member, input]; where members stand side by side, of [layer, input, member] in the copy."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < outputs)
    x = tl.load(weight + row.to(tl.int64)[:, None] * outputs + column, mask=inside, other=0.0)
    if scale is not None:
        x *= tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
    to = row
    if WIDE:
        to = (row // (members * inputs) * inputs + row % inputs) * members + row // inputs % members
    tl.store(copy + to.to(tl.int64)[:, None] * outputs + column, x.to(copy.dtype.element_ty), mask=inside)


@triton.jit
def _fold_backward(  # type: ignore[no-untyped-def]
    gradient, bias_gradient, weight, scale, shift, weight_gradient, scale_gradient, shift_gradient,
    rows, inputs, members, outputs, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < outputs)
    at = row
    if WIDE:
        at = (row // (members * inputs) * inputs + row % inputs) * members + row // inputs % members
    d = tl.load(gradient + at.to(tl.int64)[:, None] * outputs + column, mask=inside, other=0.0)
    place = row.to(tl.int64)[:, None] * outputs + column
    if scale is not None:
        w = tl.load(weight + place, mask=inside, other=0.0)
        tl.store(scale_gradient + row, tl.sum(d * w, 1), mask=row < rows)
        d *= tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
    if shift is not None:
        w = tl.load(weight + place, mask=inside, other=0.0)
        db = tl.load(bias_gradient + (row // inputs)[:, None] * outputs + column, mask=inside, other=0.0)
        tl.store(shift_gradient + row, tl.sum(db * w, 1), mask=row < rows)
        d += db * tl.load(shift + row, mask=row < rows, other=0.0)[:, None]
    tl.store(weight_gradient + place, d, mask=inside)


class Fold(torch.autograd.Function):
    """The parts of layers of one shape, [weights..., biases..., scales..., shifts...], each of these given or not
    -> narrow copies of all weights and biases, handles for the gradients of all layers, their biases.
    """

    @staticmethod
    def forward(
        ctx: Any, layers: int, given: tuple[bool, ...], wide: bool, dtype: torch.dtype, aside: Aside | None,
        *parts: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        with beside(aside, *parts):
            weight, bias, scale, shift = _stacked(layers, given, parts)
            assert weight is not None
            _, members, inputs, outputs = weight.shape
            shape = (layers, inputs, members * outputs) if wide else weight.shape
            copy = torch.empty(shape, dtype=dtype, device=weight.device)
            grid, tile = _cut(weight)
            _fold_forward[grid](weight, scale, copy, layers * members * inputs, inputs, members, outputs, wide, **tile)
            if shift is not None:
                moved = (shift[:, :, None] @ weight)[:, :, 0]
                bias = moved if bias is None else moved + bias
            # Nobody reads a handle: it is where the gradient of a folded matrix comes back, in the wide type.
            handles = torch.empty(copy.shape, dtype=weight.dtype, device=weight.device).unbind()
            biases: tuple[Tensor, ...] = ()
            bias_copy = None
            if bias is not None:
                bias = bias.flatten(1) if wide else bias
                biases, bias_copy = bias.unbind(), bias.to(dtype)
        ctx.save_for_backward(weight, scale, shift)
        ctx.given, ctx.wide, ctx.aside, ctx.biased = given, wide, aside, bias is not None
        ctx.mark_non_differentiable(copy, *(() if bias_copy is None else (bias_copy,)))
        return copy, bias_copy, *(handle.data for handle in handles), *(vector.data for vector in biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, __: None, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.aside is not None:
            ctx.aside.join()  # the gradients were made there
        weight, scale, shift = ctx.saved_tensors
        layers, members, inputs, outputs = weight.shape
        gradient = torch.stack(gradients[:layers])
        bias_gradient = torch.stack(gradients[layers:]).view(layers, members, outputs) if ctx.biased else None
        made = torch.empty_like(weight)
        scale_gradient, shift_gradient = (x if x is None else torch.empty_like(x) for x in (scale, shift))
        grid, tile = _cut(weight)
        _fold_backward[grid](
            gradient, bias_gradient, weight, scale, shift, made, scale_gradient, shift_gradient,
            layers * members * inputs, inputs, members, outputs, ctx.wide, **tile,
        )  # fmt: skip
        found: list[Tensor | None] = []
        for part, there in zip((made, bias_gradient, scale_gradient, shift_gradient), ctx.given, strict=True):
            if there:
                assert part is not None
                found += [one.data for one in part.unbind()]
        return *[None] * 5, *found


def _cut(weight: Tensor) -> tuple[tuple[int], dict[str, int]]:
    columns = triton.next_power_of_2(weight.shape[-1])
    lines = max(1, NUMBERS // columns)
    return (triton.cdiv(weight[..., 0].numel(), lines),), {"ROWS": lines, "COLUMNS": columns, "num_warps": WARPS}


def _stacked(layers: int, given: tuple[bool, ...], parts: tuple[Tensor, ...]) -> list[Tensor | None]:
    rest = list(parts)
    found: list[Tensor | None] = []
    for there in given:
        found.append(torch.stack(rest[:layers]) if there else None)
        rest = rest[layers:] if there else rest
    return found


def folded(banks: list[Bank], wide: bool, dtype: torch.dtype, aside: Aside | None) -> list[Folded]:
    """Banks of one shape; `wide` puts the members of each side by side. With `aside` all is made there."""
    names, layers = ("weight", "bias", "scale", "shift"), len(banks)
    given = tuple(getattr(banks[0], name) is not None for name in names)
    parts = [getattr(bank, name) for name, there in zip(names, given, strict=True) if there for bank in banks]
    copy, bias_copy, *made = Fold.apply(layers, given, wide, dtype, aside, *parts)
    biases = made[layers:] or [None] * layers
    bias_copies = [None] * layers if bias_copy is None else bias_copy.unbind()
    return [Folded(*parts) for parts in zip(made[:layers], copy.unbind(), biases, bias_copies, strict=True)]


class WideLinear(torch.autograd.Function):
    """rows [rows, in], weight [in, out], its copy, that of a bias [out] or None -> [rows, out].

    The gradient of the bias is not made here: whatever comes next reads this layer's gradient anyway and sums it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        copy: Tensor,
        bias: Tensor | None,
        aside: Aside | None,
        place: Place | None,
    ) -> Tensor:
        assert place is None or place.input.data_ptr() == rows.data_ptr()
        ctx.save_for_backward(rows, copy)
        ctx.aside, ctx.place, ctx.wide = aside, place, weight.dtype
        return tuned_product(rows, copy, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, copy = ctx.saved_tensors
        if ctx.place is not None:
            weight_gradient = ctx.place.deliver(gradient)
        else:
            with beside(ctx.aside, rows, gradient):
                weight_gradient = product(rows.t(), gradient, ctx.wide)
        rows_gradient = tuned_product(gradient, copy, transposed=True) if ctx.needs_input_grad[0] else None
        return rows_gradient, weight_gradient, *[None] * 4
