"""Weights of blocks side by side, with the norm before them inside: one product serves all blocks of a layer.

A norm's output times a matrix is the plain normalised stream times the matrix with its rows scaled. So the blocks of a
parallel layer, which read one stream by norms of their own, read one normalised stream. Layers of one shape are folded
together, in a few operations for all of them. The reference is the norm followed by the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.addresses import addresses
from braidlm.kernels.ops.linear import product
from braidlm.kernels.ops.tuned_products import tuned_product
from braidlm.kernels.side_stream import SideStream, current_side_stream, on_side

try:  # in a `try`, or transformers would refuse the whole folder where Triton is missing
    import triton
    import triton.language as tl
except ImportError:
    raise

ROWS, COLUMNS, NUMBERS, WARPS = 32, 64, 4096, 4
"""What a program works on at once forward, and config many numbers backward."""


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
def _at(addresses, layer, offset):  # type: ignore[no-untyped-def]
    """Where a layer's own part begins, and so many numbers further on."""
    return tl.load(addresses + layer).to(tl.pointer_type(tl.float32)) + offset


@triton.jit
def _fold_forward(  # type: ignore[no-untyped-def]
    weights, biases, scales, shifts, copy, bias, bias_copy, inputs, members, outputs,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of a member's matrix. Members that stand side by side do so as [layer, input, member, output]."""
    layer, member = (tl.program_id(0) // members).to(tl.int64), tl.program_id(0) % members
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < outputs
    weight = _at(weights, layer, member * inputs * outputs)
    total = tl.zeros([COLUMNS], tl.float32)
    if biases is not None:
        total += tl.load(_at(biases, layer, member * outputs + column), mask=real, other=0.0)
    for begin in range(0, inputs, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < inputs)[:, None] & real[None, :]
        x = tl.load(weight + row[:, None] * outputs + column[None, :], mask=inside, other=0.0)
        if shifts is not None:
            shift = tl.load(_at(shifts, layer, member * inputs + row), mask=row < inputs, other=0.0)
            total += tl.sum(x * shift[:, None], 0)
        if scales is not None:
            x *= tl.load(_at(scales, layer, member * inputs + row), mask=row < inputs, other=0.0)[:, None]
        if WIDE:
            to = (layer * inputs + row) * members + member
        else:
            to = (layer * members + member) * inputs + row
        tl.store(copy + to[:, None] * outputs + column[None, :], x.to(copy.dtype.element_ty), mask=inside)
    if bias is not None:
        offsets = tl.program_id(0).to(tl.int64) * outputs + column
        tl.store(bias + offsets, total, mask=real)
        tl.store(bias_copy + offsets, total.to(bias_copy.dtype.element_ty), mask=real)


@triton.jit
def _fold_backward(  # type: ignore[no-untyped-def]
    gradient, bias_gradient, weights, scales, shifts, weight_gradient, scale_gradient, shift_gradient,
    rows, inputs, members, outputs, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows are of [layer, member, input]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    column = tl.arange(0, COLUMNS)[None, :]
    inside = exists[:, None] & (column < outputs)
    of_layer = members * inputs
    layer, within = tl.where(exists, row // of_layer, 0), row % of_layer
    at = row
    if WIDE:
        at = (layer * inputs + row % inputs) * members + row // inputs % members
    d = tl.load(gradient + at.to(tl.int64)[:, None] * outputs + column, mask=inside, other=0.0)
    w = d
    if weights is not None:
        w = tl.load(_at(weights, layer, within * outputs)[:, None] + column, mask=inside, other=0.0)
    if scales is not None:
        tl.store(scale_gradient + row, tl.sum(d * w, 1), mask=exists)
        d *= tl.load(_at(scales, layer, within), mask=exists, other=0.0)[:, None]
    if shifts is not None:
        db = tl.load(bias_gradient + (row // inputs)[:, None] * outputs + column, mask=inside, other=0.0)
        tl.store(shift_gradient + row, tl.sum(db * w, 1), mask=exists)
        d += db * tl.load(_at(shifts, layer, within), mask=exists, other=0.0)[:, None]
    tl.store(weight_gradient + row.to(tl.int64)[:, None] * outputs + column, d, mask=inside)


@dataclass
class Folding:
    """Layers of one shape, folded; autograd hears of them when they are attached."""

    layers: list[nn.Module]
    parts: list[Tensor]
    """[weights..., biases..., scales..., shifts...], each of these there or not, as `given` says."""
    given: tuple[bool, ...]
    wide: bool
    side: SideStream | None
    bias: Tensor | None
    """[layer, ...], of all; so are the others."""
    copy: Tensor
    bias_copy: Tensor | None
    handles: Tensor
    """Nobody reads a handle: it is where the gradient of a folded matrix comes back, in the wide type."""

    def attached(self) -> dict[nn.Module, Folded]:
        made = Fold.apply(self, *self.parts)
        layers = len(self.layers)
        biases = made[layers:] or [None] * layers
        bias_copies = [None] * layers if self.bias_copy is None else self.bias_copy.unbind()
        folded = zip(made[:layers], self.copy.unbind(), biases, bias_copies, strict=True)
        return {layer: Folded(*parts) for layer, parts in zip(self.layers, folded, strict=True)}


class Fold(torch.autograd.Function):
    """A folding and its parts -> handles for the gradients of all layers, their biases."""

    @staticmethod
    def forward(ctx: Any, folding: Folding, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*parts)
        ctx.given, ctx.wide, ctx.side, ctx.layers = folding.given, folding.wide, folding.side, len(folding.layers)
        biases = () if folding.bias is None else folding.bias.unbind()
        return *(handle.data for handle in folding.handles.unbind()), *(vector.data for vector in biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts, layers = list(ctx.saved_tensors), ctx.layers
        members, inputs, outputs = parts[0].shape
        weights, _, scales, shifts = _addresses_of(parts, ctx.given, layers)
        with on_side(ctx.side, *gradients):  # where the gradients were made
            gradient, bias_gradient = side_by_side(gradients[:layers]), None
            if len(gradients) > layers:
                bias_gradient = side_by_side(gradients[layers:]).view(layers, members, outputs)
            made = gradient.new_empty(layers, members, inputs, outputs)
            scale_gradient, shift_gradient = (
                None if x is None else made.new_empty(layers, members, inputs) for x in (scales, shifts)
            )
            columns = triton.next_power_of_2(outputs)
            lines, rows = max(1, NUMBERS // columns), layers * members * inputs
            _fold_backward[(triton.cdiv(rows, lines),)](
                gradient, bias_gradient, None if scales is None and shifts is None else weights, scales, shifts,
                made, scale_gradient, shift_gradient, rows, inputs, members, outputs, ctx.wide, lines, columns,
                num_warps=WARPS,
            )  # fmt: skip
        found: list[Tensor] = []
        for part, there in zip((made, bias_gradient, scale_gradient, shift_gradient), ctx.given, strict=True):
            if there:
                assert part is not None
                found += [one.data for one in part.unbind()]
        return None, *found


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """The stack of tensors of one shape; those that already stand so in memory are not copied."""
    first, size = parts[0], parts[0].numel() * parts[0].element_size()
    begin, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    if all(
        part.is_contiguous() and part.data_ptr() == begin + i * size and part.untyped_storage().data_ptr() == memory
        for i, part in enumerate(parts)
    ):
        return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(parts))


def _addresses_of(parts: list[Tensor], given: tuple[bool, ...], layers: int) -> list[Tensor | None]:
    """Of weights, biases, scales and shifts, each of these there or not: where they are in each layer."""
    rest = [part.data_ptr() for part in parts]
    found: list[Tensor | None] = []
    for there in given:
        found.append(addresses(tuple(rest[:layers]), parts[0].device) if there else None)
        rest = rest[layers:] if there else rest
    return found


def fold(banks: dict[nn.Module, Bank], wide: bool, dtype: torch.dtype) -> Folding:
    """Banks of one shape; `wide` puts the members of each side by side. All is made on the side stream."""
    names, some = ("weight", "bias", "scale", "shift"), next(iter(banks.values()))
    given = tuple(getattr(some, name) is not None for name in names)
    parts = [getattr(bank, name) for name, there in zip(names, given, strict=True) if there for bank in banks.values()]
    layers, (members, inputs, outputs) = len(banks), some.weight.shape
    assert all(part.dtype == torch.float32 and part.is_contiguous() for part in parts)
    weights, biases, scales, shifts = _addresses_of(parts, given, layers)
    side = current_side_stream()
    with on_side(side, *parts):
        shape = (layers, inputs, members * outputs) if wide else (layers, members, inputs, outputs)
        handles = parts[0].new_empty(shape)
        copy = torch.empty_like(handles, dtype=dtype)
        bias = bias_copy = None
        if biases is not None or shifts is not None:
            bias = handles.new_empty(layers, members * outputs) if wide else handles.new_empty(layers, members, outputs)
            bias_copy = torch.empty_like(bias, dtype=dtype)
        _fold_forward[(layers * members, triton.cdiv(outputs, COLUMNS))](
            weights, biases, scales, shifts, copy, bias, bias_copy, inputs, members, outputs,
            wide, ROWS, COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return Folding(list(banks), parts, given, wide, side, bias, copy, bias_copy, handles)


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
        slot: GradientSlot | None,
    ) -> Tensor:
        assert slot is None or slot.input.data_ptr() == rows.data_ptr()
        ctx.save_for_backward(rows, copy)
        ctx.side, ctx.slot, ctx.wide = current_side_stream(), slot, weight.dtype
        return tuned_product(rows, copy, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, copy = ctx.saved_tensors
        if ctx.slot is not None:
            weight_gradient = ctx.slot.submit(gradient)
        else:
            with on_side(ctx.side, rows, gradient):
                weight_gradient = product(rows.t(), gradient, ctx.wide)
        rows_gradient = tuned_product(gradient, copy, transposed=True) if ctx.needs_input_grad[0] else None
        return rows_gradient, weight_gradient, None, None, None
