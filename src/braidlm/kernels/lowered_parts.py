"""Which parts of a model kernels serve, and what a pass prepares for them before its first layer.

The pass, `braid show` and a run's log ask lowerings which parts kernels serve. A part that is refused runs its own
plain forward inside the same pass, so that only its layer is slower. Casts, folded weights and memory for gradients are
prepared as lowerings ask for: the gradients of layers of one shape lie side by side, so that one launch serves all.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from braidlm.kernels import lowerings
from braidlm.kernels.gradient_stacks import ROWS, GradientSlot
from braidlm.kernels.lowerings.lowering import LayerLowering, SharedStack, lowering_of, refusal
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.fold import Bank, Folding, fold
from braidlm.kernels.routed.grouped.weights import STACKED_ROWS as GROUPED_ROWS
from braidlm.model.config.registry import import_files
from braidlm.model.language_model import LanguageModel
from braidlm.model.stages import Stage

import_files(lowerings.__name__)

BLOCKS_SUMMED_TOGETHER = 4
"""Blocks whose vectors' gradients are finished by one launch."""
T = TypeVar("T")
Layers = list[tuple[nn.Module, set[nn.Module]]]
"""The layers in the order of the model, each with the set of all parts that are lowered."""
RowGroups = list[tuple[int, Layers]]
"""Layers with the number of rows that they compute."""


class Lowered:
    """Which parts of a model kernels serve, and why the others run their plain forward."""

    def __init__(self, model: LanguageModel):
        self.body: Any = model.model
        self.parts: set[nn.Module] = set()
        self.refusals: dict[str, str] = {}
        """By the address of a part in the model."""
        self.layers: list[tuple[Any, nn.Module]] = []
        """Stage and layer, in order; a stage that does not run its layers one by one is its only layer."""
        self.addresses: list[str] = []
        """The addresses of the layers."""
        self._add("embedding", self.body.embedding)
        for index, stage in enumerate(self.body.stages):
            kind: Any = type(stage)
            if kind.forward is Stage.forward and kind.run_some is Stage.run_some:
                for number, layer in enumerate(stage.layers):  # type: ignore[arg-type]
                    self._add_layer(f"stages.{index}.layers.{number}", stage, layer)
            else:
                self._add_layer(f"stages.{index}", stage, stage)
        self._add("norm", self.body.norm)
        self._add("head", model.head)

    @property
    def serves_layers(self) -> bool:
        """Whether kernels serve at least a part of a layer."""
        parts = [[part for *_, part in sublayers(layer)] or [layer] for _, layer in self.layers]
        return any(part in self.parts for some in parts for part in some)

    def summary(self) -> str:
        """One line: how many layers are lowered, and what is not with its reason."""
        plain: dict[str, list[str]] = {}
        for address, reason in self.refusals.items():
            plain.setdefault(reason, []).append(address)
        partly = {layer for layer in self.addresses for part in self.refusals if f"{part}.".startswith(f"{layer}.")}
        text = f"kernels serve {len(self.addresses) - len(partly)} of {len(self.addresses)} layers whole"
        for reason, refused in plain.items():
            shown = ", ".join(refused[:3]) + (f" and {len(refused) - 3} more" if len(refused) > 3 else "")
            text += f"; plain: {shown} ({reason})"
        return text

    def _add_layer(self, address: str, stage: Any, layer: nn.Module) -> None:
        self.layers.append((stage, layer))
        self.addresses.append(address)
        if not self._add(address, layer, self._skips()):
            return
        inside = lowering_of(layer).inside(layer, 1)
        if inside is not None:
            self.parts |= {inside[0], *(part for *_, part in sublayers(inside[0]))}
        for kind, norm, part in sublayers(layer):
            reason = refusal(norm, self.body)
            self._add(f"{address}.{kind}", part, reason and f"norm: {reason}")

    def _skips(self) -> str | None:
        """Why every layer is refused, if only the plain pass knows which of them are run."""
        if any(stage.training and getattr(stage, "drops", None) is not None for stage in self.body.stages):
            return "texts pass by layers at random (dropout.layer)"
        return None if self.body.exit_layer is None else f"passes end after layer {self.body.exit_layer}"

    def _add(self, address: str, part: nn.Module, reason: str | None = None) -> bool:
        reason = reason or refusal(part, self.body)
        if reason is None:
            self.parts.add(part)
        else:
            self.refusals[address] = reason
        return reason is None


def layer_lowering(layer: nn.Module) -> LayerLowering:
    """The lowering of a layer; a layer without one has no sublayers and no layer inside."""
    return lowering_of(layer) or LayerLowering()


def sublayers(layer: nn.Module) -> list[tuple[str, Any, Any]]:
    """Kind, norm and part of each sublayer of a layer that has some."""
    return layer_lowering(layer).sublayers(layer)


def is_served_now(layer: nn.Module) -> bool:
    """Whether kernels, if they serve a layer, do so in its present mode."""
    return layer.training or not layer_lowering(layer).only_training


def row_groups(layers: list[Any], lowered: set[nn.Module], batch: int, time: int) -> RowGroups:
    """The layers with the number of rows that they compute: blocks inside a mixture of depths, in training, have fewer.

    Where there are such blocks, the groups end after as many layers as a stack of gradients holds: else all of them
    would be complete only at the end of the backward pass, with nothing left to run beside them.
    """
    outer = [layer for layer in layers if is_served_now(layer)]
    inside = {layer: inner for layer in outer if (inner := layer_lowering(layer).inside(layer, time)) is not None}
    groups: RowGroups = []
    for some in _chunks(outer, max(1, ROWS // (batch * time) if inside else len(outer))):
        by_rows: dict[int, Layers] = {batch * time: [(layer, lowered) for layer in some]}
        for layer in some:
            if layer in inside:
                inner, tokens = inside[layer]
                by_rows.setdefault(batch * tokens, []).append((inner, lowered))
        groups += by_rows.items()
    return groups


def read_parameters(layers: Layers) -> list[Tensor]:
    """The parameters that products read as they are, in a cast copy."""
    read = [parameter for _, part, _ in _parts(layers) for parameter in lowering_of(part).reads(part)]
    return list(dict.fromkeys(parameter for parameter in read if parameter is not None))  # layers may share some


def fold_all(layers: Layers, dtype: torch.dtype) -> list[Folding]:
    """Matrices with their norm folded in, or with the members of a bank side by side; those of one shape at once."""
    alike: dict[Any, dict[nn.Module, Bank]] = defaultdict(dict)
    for _, part, _ in _parts(layers):
        for linear, bank in lowering_of(part).folds(part).items():
            alike[bank.kind][linear] = bank
    return [fold(banks, dtype) for banks in alike.values()]


def gradient_slots(groups: RowGroups, dtype: torch.dtype) -> dict[nn.Module, GradientSlot]:
    """The slots of all matrices that have some; no stack is made where a single part fills the device."""
    slots: dict[nn.Module, GradientSlot] = {}
    for rows, layers in groups:
        alike: dict[Any, list[SharedStack]] = defaultdict(list)
        for block, part, _ in _parts(layers):
            for stack in lowering_of(part).stacks(part, rows, dtype):
                together = (GROUPED_ROWS if stack.grouped else ROWS) // stack.rows
                if together > 1:
                    chunk = block // together if stack.by_blocks else None
                    alike[together, stack.key, stack.grouped, chunk].append(stack)
        for (together, *_), stacks in alike.items():
            for some in _chunks(stacks, together):
                for index, made in enumerate(some[0].make(len(some))):
                    slots |= zip((stack.matrices[index] for stack in some), made.slots(), strict=True)
    return slots


def column_sums(groups: RowGroups) -> dict[nn.Module, ColumnSums]:
    """Where the gradients of vectors and of routers are summed: parts of one shape together."""
    sums: dict[nn.Module, ColumnSums] = {}
    for _, layers in groups:
        alike: dict[Any, list[nn.Module]] = defaultdict(list)
        for block, part, norm in _parts(layers):
            for one in lowering_of(part).sums(part, norm):
                alike[one.key, block // BLOCKS_SUMMED_TOGETHER if one.by_blocks else None].append(one.module)
        for modules in alike.values():
            sums |= dict.fromkeys(modules, ColumnSums(len(modules)))
    return sums


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
