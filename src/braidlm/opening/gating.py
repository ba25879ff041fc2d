"""Gates on a decoder of transformers: attached around its layers, read, switched off, and taken away again.

The layers are found by their structure: a model of transformers says nowhere what its parts are called.

Only a gate at zero can be folded into the weights exactly; docs/gates.md says why.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from braidlm.core.errors import BraidError
from braidlm.model.gates import Gate, GatedLayer, GatesConfig, ScalarGate, VectorGate, gated, make_gate, ungated
from braidlm.model.language_model import LanguageModel
from braidlm.model.layer_skip import layers_of

MEMBERS = "braid_members"
"""What config.json calls a model of several decoders (`model/members.py`, imported where such a folder is opened)."""


def has_members(model: Any) -> bool:
    """Whether a model is one of several decoders."""
    return getattr(model.config, "model_type", None) == MEMBERS


@dataclass(frozen=True)
class DecoderParts:
    """Where the stream of a decoder begins, goes through and ends."""

    layers: nn.ModuleList
    layers_name: str
    """Their name in the model: `model.layers`, `transformer.h`."""
    norm: nn.Module
    """Before the head; an identity where there is none."""
    head: nn.Module
    embedding: nn.Module
    width: int


def find_parts(model: "transformers.PreTrainedModel") -> DecoderParts:
    """The parts of a decoder; an error for models of other kinds, and where no layers are found."""
    if has_members(model):
        what = f"this is a model of several decoders ({', '.join(model.names)}), and no one of them is meant"
        raise BraidError(what, todo="Change each by itself, and compose them again.")
    check_decoder(model.config)
    config = model.config.get_text_config()
    depth, width = config.num_hidden_layers, config.hidden_size
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    # Layers are told by their class's name, since gates and FSDP make other classes of those that they change.
    found = [name for name, layers in lists.items() if len(layers) == depth and " or " not in _classes(layers)]
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    head = model.get_output_embeddings()
    if len(outer) != 1 or head is None:
        raise _not_found(model, depth, lists, outer)
    (name,) = outer
    around = model.get_submodule(name.rpartition(".")[0]).children()
    # The last part beside the layers that holds nothing but vectors of the stream's width is the norm.
    norms = [part for part in around if {tuple(weight.shape) for weight in part.parameters()} == {(width,)}]
    norm = norms[-1] if norms else nn.Identity()
    return DecoderParts(lists[name], name, norm, head, model.get_input_embeddings(), width)


def check_decoder(config: "transformers.PretrainedConfig") -> None:
    """Refuse the configuration of a model that does not predict the next token from those before it alone."""
    name = f"'{config.model_type}'"
    todo = "Use a decoder, such as a Llama, Mistral, Qwen, Phi-3, GPT-2 or GPT-NeoX model."
    if config.is_encoder_decoder:
        raise BraidError(f"this is an encoder and a decoder ({name}); gates are for a decoder alone", todo=todo)
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise BraidError(f"this is an encoder ({name}), in which tokens see those after them", todo=todo)


def _not_found(
    model: "transformers.PreTrainedModel", depth: int, lists: dict[str, nn.ModuleList], found: list[str]
) -> BraidError:
    name = type(model).__name__
    if found and model.get_output_embeddings() is None:
        what = f"{name} has layers but no head that predicts tokens"
        return BraidError(what, todo="Open it with AutoModelForCausalLM.")
    seen = [f"{name} ({len(layers)} x {_classes(layers)})" for name, layers in lists.items() if len(layers)]
    what = "several lists of modules could be" if found else "no list of modules is"
    return BraidError(
        f"the layers of {name} cannot be told: its configuration says {depth}, and {what} that many of one class; "
        f"found: {', '.join(seen) or 'no list of modules at all'}"
    )


def _classes(layers: nn.ModuleList) -> str:
    return " or ".join(sorted({type(layer).__name__ for layer in layers}))


REASONS: dict[type[Gate], str] = {
    ScalarGate: "it scales the residual, and what reads the stream inside the layer or behind it would have to change",
    VectorGate: "its factors differ between channels, and norms behind it would divide by something else",
}
MATRIX = "it mixes channels of the residual, around which no weight of the layer goes"


def attach(model: "transformers.PreTrainedModel", gates: GatesConfig) -> None:
    """Put gates, which begin at zero, around layers of a decoder: names of its parameters stay as they are. They are in
    float32 whatever the base's type is, and on the device of their layer."""
    if gates_of(model):
        raise BraidError("this model has gates already", todo="Detach them first, or train those that it has.")
    parts = find_parts(model)
    for number in gates.for_depth(len(parts.layers)).layers or ():
        layer = parts.layers[number - 1]
        with torch.device(_device(layer)):
            gate = make_gate(gates.kind, parts.width)
        gate.train(layer.training)
        parts.layers[number - 1] = _moved_hook(layer, gated(layer, gate))


def detach(model: "transformers.PreTrainedModel", numbers: Collection[int] | None = None) -> None:
    """Take the gates of these layers away, or all: without any, the model computes what the base computes."""
    layers = find_parts(model).layers
    for index, layer in enumerate(layers):
        if isinstance(layer, GatedLayer) and (numbers is None or index + 1 in numbers):
            layers[index] = _moved_hook(layer, ungated(layer))


def gates_of(model: Any) -> dict[int, Gate]:
    """The gates of a decoder or of a Braid model, by the numbers of their layers, counted from 1."""
    if has_members(model):
        return {}
    if isinstance(model, LanguageModel):
        layers = [layer for stage in model.model.stages for layer in layers_of(stage)]
    else:
        layers = list(find_parts(model).layers)
    return {number: layer.gate for number, layer in enumerate(layers, 1) if isinstance(layer, GatedLayer)}


@contextmanager
def without(model: Any, layers: Iterable[int]) -> Iterator[None]:
    """Switch the gates of these layers off for a while."""
    gates = gates_of(model)
    before = {gates[number]: gates[number].is_off for number in layers}
    try:
        for gate in before:
            gate.is_off = True
        yield
    finally:
        for gate, was_off in before.items():
            gate.is_off = was_off


def is_zero(gate: Any) -> bool:
    """Whether a gate adds nothing to any stream."""
    bias, down = getattr(gate, "bias", None), getattr(gate, "down", None)
    is_silent = not gate.weight.any() or (down is not None and not down.any())
    return bool(is_silent and (bias is None or not bias.any()))


def folding_refusals(model: Any) -> dict[int, str]:
    """The gates of a decoder or a Braid model that cannot be folded away exactly, by layer, and why."""
    return {number: REASONS.get(type(gate), MATRIX) for number, gate in gates_of(model).items() if not is_zero(gate)}


def fold(model: "transformers.PreTrainedModel") -> dict[int, str]:
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
