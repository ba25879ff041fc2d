"""Gates on a decoder of transformers: attached around its layers, read, switched off, and taken away again.

Folding a gate into the weights: a gate at zero can always go. Any other changes the residual itself: with a factor g,
a layer h + f(h) becomes (1 + g) h + f(h), and the stream would have to be divided by 1 + g from there on.

- In a layer of two sublayers, h + a(h) + m(h + a(h)), the second reads what the first added. Divided, a(h) would have
  to be two things: a(h) for m to read, and a(h) / (1 + g) in the sum. No weight can be both.
- Where both sublayers read the same stream (GPT-NeoX), one factor for all channels could be taken over by the weights
  that write the stream, since norms do not see the scale of what they read, but for their epsilon: each norm after it
  would need an epsilon of its own, divided by (1 + g)^2, and a configuration of transformers has one for all.
- Factors that differ between channels, and matrices, change what a norm divides by.

So no gate that is not zero is folded: the result would be another function, and what it computes could not be saved.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from braidlm.core.errors import BraidError
from braidlm.model.gates import Gate, GatedLayer, GatesConfig, ScalarGate, VectorGate, gated, make_gate, ungated
from braidlm.opening.structure import find_parts, layers_in

REASONS: dict[type[Gate], str] = {
    ScalarGate: "it scales the residual, and what reads the stream inside the layer or behind it would have to change",
    VectorGate: "its factors differ between channels, and norms behind it would divide by something else",
}
MATRIX = "it mixes channels of the residual, around which no weight of the layer goes"


def attach(model: PreTrainedModel, gates: GatesConfig) -> None:
    """Put gates, which begin at zero, around layers of a decoder: names of its parameters stay as they are.

    They are in float32 whatever the base's type is, and on the device of their layer.
    """
    if gates_of(model):
        raise BraidError("this model has gates already", todo="Detach them first, or train those that it has.")
    parts = find_parts(model)
    for number in gates.for_depth(len(parts.layers)).layers or ():
        layer = parts.layers[number - 1]
        with torch.device(_device(layer)):
            gate = make_gate(gates.kind, parts.width)
        gate.train(layer.training)
        parts.layers[number - 1] = _moved_hook(layer, gated(layer, gate))


def detach(model: PreTrainedModel, numbers: Collection[int] | None = None) -> None:
    """Take the gates of these layers away, or all: without any, the model computes what the base computes."""
    layers = find_parts(model).layers
    for index, layer in enumerate(layers):
        if isinstance(layer, GatedLayer) and (numbers is None or index + 1 in numbers):
            layers[index] = _moved_hook(layer, ungated(layer))


def gates_of(model: Any) -> dict[int, Gate]:
    """The gates of a decoder or of a Braid model, by the numbers of their layers, counted from 1."""
    layers = enumerate(layers_in(model), start=1)
    return {number: layer.gate for number, layer in layers if isinstance(layer, GatedLayer)}


@contextmanager
def without(model: Any, layers: Iterable[int]) -> Iterator[None]:
    """Switch the gates of these layers off for a while."""
    gates = gates_of(model)
    chosen = [gates[number] for number in layers]
    before = [gate.is_off for gate in chosen]
    try:
        for gate in chosen:
            gate.is_off = True
        yield
    finally:
        for gate, was_off in zip(chosen, before, strict=True):
            gate.is_off = was_off


def is_zero(gate: Any) -> bool:
    """Whether a gate adds nothing to any stream."""
    bias, down = getattr(gate, "bias", None), getattr(gate, "down", None)
    if bias is not None and bool(bias.any()):
        return False
    return not bool(gate.weight.any()) or (down is not None and not bool(down.any()))


def folding_refusals(model: Any) -> dict[int, str]:
    """The gates of a decoder or a Braid model that cannot be folded away exactly, by layer, and why."""
    return {number: REASONS.get(type(gate), MATRIX) for number, gate in gates_of(model).items() if not is_zero(gate)}


def fold(model: PreTrainedModel) -> dict[int, str]:
    """Take the gates of a decoder away that can go without changing a bit; the others stay, with the reasons."""
    refused = folding_refusals(model)
    detach(model, [number for number in gates_of(model) if number not in refused])
    return refused


def _device(layer: nn.Module) -> torch.device | int | str:
    """Where a layer computes: its weights may be elsewhere, if accelerate brings them in when they are needed."""
    hook: Any = getattr(layer, "_hf_hook", None)
    if getattr(hook, "execution_device", None) is not None:
        return hook.execution_device  # type: ignore[no-any-return]
    return next(layer.parameters()).device


def _moved_hook(old: nn.Module, new: nn.Module) -> nn.Module:
    """Let accelerate's hook, which stands in place of the old module's own forward, be the new one's."""
    hook: Any = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        for name in ("forward", "_old_forward", "_hf_hook"):
            new.__dict__.pop(name, None)
        add_hook_to_module(new, hook)
    return new
