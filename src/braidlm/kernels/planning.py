"""What a pass prepares before its first layer: casts, folded weights, and memory for gradients, as lowerings ask for.

The gradients of layers of one shape lie side by side, so that one launch serves all of them.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from braidlm.kernels.gradient_stacks import ROWS, GradientSlot
from braidlm.kernels.lowerings.lowering import lowering_of
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.fold import Bank, Folding, fold
from braidlm.kernels.routed.gradient_stacks import ROWS as GROUPED_ROWS

BLOCKS_SUMMED_TOGETHER = 4
"""Blocks whose vectors' gradients are finished by one launch."""
T = TypeVar("T")
Layers = list[tuple[nn.Module, set[nn.Module]]]
"""The layers in the order of the model, each with the set of all parts that are lowered."""


def is_served_now(layer: nn.Module) -> bool:
    """Whether kernels, if they serve a layer, do so in its present mode."""
    lowering = lowering_of(layer)
    return lowering is None or layer.training or not lowering.only_training


def row_groups(layers: list[Any], lowered: set[nn.Module], batch: int, time: int) -> list[tuple[int, Layers]]:
    """The layers with the number of rows that they compute: blocks inside a mixture of depths, in training, have fewer.

    Where there are such blocks, the groups end after as many layers as a stack of gradients holds: else all of them
    would be complete only at the end of the backward pass, with nothing left to run beside them.
    """
    outer = [layer for layer in layers if is_served_now(layer)]
    inside = {layer: inner for layer in outer if (inner := layer_inside(layer, time)) is not None}
    together = max(1, ROWS // (batch * time) if inside else len(outer))
    groups: list[tuple[int, Layers]] = []
    for some in _chunks(outer, together):
        by_rows: dict[int, Layers] = {batch * time: [(layer, lowered) for layer in some]}
        for layer in some:
            if layer in inside:
                inner, tokens = inside[layer]
                by_rows.setdefault(batch * tokens, []).append((inner, lowered))
        groups += by_rows.items()
    return groups


def layer_inside(layer: nn.Module, time: int) -> tuple[Any, int] | None:
    """The layer inside another one, and how many of `time` tokens it computes."""
    lowering = lowering_of(layer)
    return None if lowering is None else lowering.inside(layer, time)


def sublayers(layer: nn.Module) -> list[tuple[str, Any, Any]]:
    """Kind, norm and part of each sublayer of a layer that has some."""
    lowering = lowering_of(layer)
    return [] if lowering is None else lowering.sublayers(layer)


def united(parts: Iterable[dict[nn.Module, T]]) -> dict[nn.Module, T]:
    """The entries of several dictionaries in one."""
    return {key: value for part in parts for key, value in part.items()}


def read_parameters(layers: Layers) -> list[Tensor]:
    """The parameters that products read as they are, in a cast copy."""
    read = [parameter for _, part, _ in _parts(layers) for parameter in lowering_of(part).reads(part)]
    return list(dict.fromkeys(parameter for parameter in read if parameter is not None))  # layers may share some


def fold_all(layers: Layers, dtype: torch.dtype) -> list[Folding]:
    """Matrices with their norm folded in, or with the members of a bank side by side; those of one shape at once."""
    alike: dict[Any, dict[nn.Module, Bank]] = {}
    for _, part, _ in _parts(layers):
        for folded in lowering_of(part).folds(part):
            bank = folded.bank
            absent = (vector is None for vector in (bank.bias, bank.scale, bank.shift))
            alike.setdefault((folded.concatenated, bank.weight.shape, *absent), {})[folded.linear] = bank
    return [fold(banks, kind[0], dtype) for kind, banks in alike.items()]


def gradient_slots(layers: Layers, rows: int, dtype: torch.dtype) -> dict[nn.Module, GradientSlot]:
    """The slots of all matrices that have some, where each layer computes so many rows.

    No stack is made where a single part fills the device.
    """
    alike: dict[Any, list[Any]] = {}
    for block, part, _ in _parts(layers):
        for stack in lowering_of(part).stacks(part, rows, dtype):
            together = (GROUPED_ROWS if stack.grouped else ROWS) // stack.rows
            if together > 1:
                chunk = block // together if stack.by_blocks else None
                alike.setdefault((stack.key, stack.grouped, together, chunk), []).append(stack)
    slots: dict[nn.Module, GradientSlot] = {}
    for (_, _, together, _), stacks in alike.items():
        for some in _chunks(stacks, together):
            for index, made in enumerate(some[0].make(len(some))):
                slots |= zip((stack.matrices[index] for stack in some), made.slots(), strict=True)
    return slots


def column_sums(layers: Layers) -> dict[nn.Module, ColumnSums]:
    """Where the gradients of vectors and of routers are summed: parts of one shape together."""
    alike: dict[Any, list[nn.Module]] = {}
    for block, part, norm in _parts(layers):
        for summed in lowering_of(part).sums(part, norm):
            chunk = block // BLOCKS_SUMMED_TOGETHER if summed.by_blocks else None
            alike.setdefault((summed.key, chunk), []).append(summed.module)
    return {module: sums for some in alike.values() for sums in [ColumnSums(len(some))] for module in some}


def _parts(layers: Layers) -> Iterator[tuple[int, Any, Any]]:
    """Each lowered part with the number of the block that it is in and its norm; other layers are their own part."""
    blocks = 0
    for layer, lowered in layers:
        inner = sublayers(layer)
        if inner:
            yield from ((blocks, part, norm) for _, norm, part in inner if part in lowered)
            blocks += 1
        elif layer in lowered:
            yield blocks, layer, None


def _chunks(items: list[T], size: int) -> Iterable[list[T]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
