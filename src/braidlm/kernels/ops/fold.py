"""Folding the norms of parallel blocks into the weights behind them, so that one product serves all blocks of a layer.

A norm's output times a matrix equals the stream normalised without scale times the matrix with scaled rows. So the
blocks of a parallel layer, each with a norm of its own, read one normalised stream. Layers of one shape are folded in
one launch. The reference is the norm followed by the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from braidlm.kernels.ops.launch import addresses
from braidlm.kernels.optional_triton import tl, triton
from braidlm.kernels.side_stream import SideStream, current_side_stream, on_side

ROWS, COLUMNS, ELEMENTS, WARPS = 32, 64, 4096, 4
"""A program's block forward, its elements backward, and its warps."""
NAMES = ("weight", "bias", "scale", "shift")


@dataclass
class Bank:
    """Matrices of some blocks [member, in, out] and their biases, with the norm that they read."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    """[member, in], of the norm."""
    shift: Tensor | None = None
    """[member, in], of the norm."""
    concatenated: bool = False
    """Whether one product reads the members side by side, as one matrix."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What banks that are folded together have in common."""
        return self.concatenated, self.weight.shape, *(x is None for x in (self.bias, self.scale, self.shift))


@dataclass
class Folded:
    """One layer's matrices as a product reads them."""

    weight: Tensor
    """Autograd returns the gradient to it; its values are never read."""
    cast: Tensor
    """[member, in, out], or concatenated [in, member * out]."""
    bias: Tensor | None
    """[member, out], or [member * out], in float32."""
    bias_cast: Tensor | None
    """The bias in the type of the cast."""


@triton.jit
def _pointer(addresses, layer, offset):  # type: ignore[no-untyped-def]
    """A pointer to a layer's tensor plus an offset."""
    return tl.load(addresses + layer).to(tl.pointer_type(tl.float32)) + offset


@triton.jit
def _fold_forward(  # type: ignore[no-untyped-def]
    weights, biases, scales, shifts, cast, bias, bias_cast, inputs, members, outputs,
    CONCATENATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of a member's matrix; concatenated members are [layer, input, member, output]."""
    layer, member = (tl.program_id(0) // members).to(tl.int64), tl.program_id(0) % members
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < outputs
    weight = _pointer(weights, layer, member * inputs * outputs)
    total = tl.zeros([COLUMNS], tl.float32)
    if biases is not None:
        total += tl.load(_pointer(biases, layer, member * outputs + column), mask=column_mask, other=0.0)
    for begin in range(0, inputs, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row < inputs)[:, None] & column_mask[None, :]
        x = tl.load(weight + row[:, None] * outputs + column[None, :], mask=mask, other=0.0)
        if shifts is not None:
            shift = tl.load(_pointer(shifts, layer, member * inputs + row), mask=row < inputs, other=0.0)
            total += tl.sum(x * shift[:, None], 0)
        if scales is not None:
            x *= tl.load(_pointer(scales, layer, member * inputs + row), mask=row < inputs, other=0.0)[:, None]
        if CONCATENATED:
            target_row = (layer * inputs + row) * members + member
        else:
            target_row = (layer * members + member) * inputs + row
        tl.store(cast + target_row[:, None] * outputs + column[None, :], x.to(cast.dtype.element_ty), mask=mask)
    if bias is not None:
        offsets = tl.program_id(0).to(tl.int64) * outputs + column
        tl.store(bias + offsets, total, mask=column_mask)
        tl.store(bias_cast + offsets, total.to(bias_cast.dtype.element_ty), mask=column_mask)


@triton.jit
def _fold_backward(  # type: ignore[no-untyped-def]
    gradient, bias_gradient, weights, scales, shifts, weight_gradient, scale_gradient, shift_gradient,
    rows, inputs, members, outputs, CONCATENATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A row is a [layer, member, input]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    column = tl.arange(0, COLUMNS)[None, :]
    mask = row_mask[:, None] & (column < outputs)
    of_layer = members * inputs
    layer, within = tl.where(row_mask, row // of_layer, 0), row % of_layer
    source_row = row
    if CONCATENATED:
        source_row = (layer * inputs + row % inputs) * members + row // inputs % members
    d = tl.load(gradient + source_row.to(tl.int64)[:, None] * outputs + column, mask=mask, other=0.0)
    w = d
    if weights is not None:
        w = tl.load(_pointer(weights, layer, within * outputs)[:, None] + column, mask=mask, other=0.0)
    if scales is not None:
        tl.store(scale_gradient + row, tl.sum(d * w, 1), mask=row_mask)
        d *= tl.load(_pointer(scales, layer, within), mask=row_mask, other=0.0)[:, None]
    if shifts is not None:
        db = tl.load(bias_gradient + (row // inputs)[:, None] * outputs + column, mask=mask, other=0.0)
        tl.store(shift_gradient + row, tl.sum(db * w, 1), mask=row_mask)
        d += db * tl.load(_pointer(shifts, layer, within), mask=row_mask, other=0.0)[:, None]
    tl.store(weight_gradient + row.to(tl.int64)[:, None] * outputs + column, d, mask=mask)


@dataclass
class Folding:
    """Folded layers of one shape; `attach` adds them to the autograd graph."""

    layers: list[nn.Module]
    parts: dict[str, list[Tensor]]
    """The layers' tensors by the names of a bank's fields; some fields may be missing."""
    concatenated: bool
    side: SideStream | None
    bias: Tensor | None
    """[layer, ...], as the tensors below."""
    cast: Tensor
    bias_cast: Tensor | None
    handles: Tensor
    """Autograd returns the float32 gradients of folded matrices to these; their values are never read."""

    def attach(self) -> dict[nn.Module, Folded]:
        outputs = Fold.apply(self, *(part for column in self.parts.values() for part in column))
        layers = len(self.layers)
        biases = outputs[layers:] or [None] * layers
        bias_casts = [None] * layers if self.bias_cast is None else self.bias_cast.unbind()
        folded = zip(outputs[:layers], self.cast.unbind(), biases, bias_casts, strict=True)
        return {layer: Folded(*parts) for layer, parts in zip(self.layers, folded, strict=True)}


class Fold(torch.autograd.Function):
    """A folding and its parts -> the handles of all layers, then their biases."""

    @staticmethod
    def forward(ctx: Any, folding: Folding, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*parts)
        ctx.names, ctx.concatenated = tuple(folding.parts), folding.concatenated
        ctx.side, ctx.layers = folding.side, len(folding.layers)
        biases = () if folding.bias is None else folding.bias.unbind()
        return *(handle.data for handle in folding.handles.unbind()), *(vector.data for vector in biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts, layers = ctx.saved_tensors, ctx.layers
        members, inputs, outputs = parts[0].shape
        columns = {name: parts[layers * n : layers * (n + 1)] for n, name in enumerate(ctx.names)}
        weights, _, scales, shifts = _addresses_of(columns)
        with on_side(ctx.side, *gradients):  # the side stream computed the gradients
            gradient, bias_gradient = stacked(gradients[:layers]), None
            if len(gradients) > layers:
                bias_gradient = stacked(gradients[layers:]).view(layers, members, outputs)
            weight_gradient = gradient.new_empty(layers, members, inputs, outputs)
            scale_gradient, shift_gradient = (
                None if x is None else weight_gradient.new_empty(layers, members, inputs) for x in (scales, shifts)
            )
            width = triton.next_power_of_2(outputs)
            block_rows, rows = max(1, ELEMENTS // width), layers * members * inputs
            _fold_backward[(triton.cdiv(rows, block_rows),)](
                gradient, bias_gradient, None if scales is None and shifts is None else weights, scales, shifts,
                weight_gradient, scale_gradient, shift_gradient, rows, inputs, members, outputs, ctx.concatenated,
                block_rows, width, num_warps=WARPS,
            )  # fmt: skip
        results = dict(zip(NAMES, (weight_gradient, bias_gradient, scale_gradient, shift_gradient), strict=True))
        return None, *(one.data for name in ctx.names for one in results[name].unbind())  # type: ignore[union-attr]


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """The stack of tensors of one shape, without a copy where they are adjacent in memory."""
    first, size = parts[0], parts[0].numel() * parts[0].element_size()
    begin, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    if all(
        part.is_contiguous() and part.data_ptr() == begin + i * size and part.untyped_storage().data_ptr() == memory
        for i, part in enumerate(parts)
    ):
        return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(parts))


def _addresses_of(columns: dict[str, Any]) -> list[Tensor | None]:
    """The addresses of weights, biases, scales and shifts in each layer, or None for those that are missing."""
    device = columns["weight"][0].device
    numbers = {name: tuple(part.data_ptr() for part in column) for name, column in columns.items()}
    return [addresses(numbers[name], device) if name in numbers else None for name in NAMES]


def fold(banks: dict[nn.Module, Bank], dtype: torch.dtype) -> Folding:
    """Fold banks of one shape on the side stream."""
    some, side = next(iter(banks.values())), current_side_stream()
    present = [name for name in NAMES if getattr(some, name) is not None]
    parts = {name: [getattr(bank, name) for bank in banks.values()] for name in present}
    flat = [part for column in parts.values() for part in column]
    assert all(part.dtype == torch.float32 and part.is_contiguous() for part in flat)
    layers, (members, inputs, outputs) = len(banks), some.weight.shape
    weights, biases, scales, shifts = _addresses_of(parts)
    with on_side(side, *flat):
        matrix = (inputs, members * outputs) if some.concatenated else (members, inputs, outputs)
        handles = flat[0].new_empty(layers, *matrix)
        cast = torch.empty_like(handles, dtype=dtype)
        bias = bias_cast = None
        if biases is not None or shifts is not None:
            bias = handles.new_empty(layers, *((members * outputs,) if some.concatenated else (members, outputs)))
            bias_cast = torch.empty_like(bias, dtype=dtype)
        _fold_forward[(layers * members, triton.cdiv(outputs, COLUMNS))](
            weights, biases, scales, shifts, cast, bias, bias_cast, inputs, members, outputs,
            some.concatenated, ROWS, COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return Folding(list(banks), parts, some.concatenated, side, bias, cast, bias_cast, handles)


def plain_fold(bank: Bank) -> tuple[Tensor, Tensor | None]:
    """The reference of a bank's folded weight [member, in, out] and bias [member, out], in torch's operations."""
    weight, bias = bank.weight, bank.bias
    if bank.shift is not None:
        shifted = (bank.shift[:, :, None] * weight).sum(1)
        bias = shifted if bias is None else bias + shifted
    return weight if bank.scale is None else weight * bank.scale[:, :, None], bias
