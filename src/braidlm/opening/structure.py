"""The parts of a decoder, found by their structure: a model of transformers says nowhere what its layers are called."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from braidlm.core.errors import BraidError
from braidlm.model.layer_skip import layers_of
from braidlm.model.modeling_braid import BraidForCausalLM


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
    """Channels of the stream."""


def find_parts(model: PreTrainedModel) -> DecoderParts:
    """The parts of a decoder; an error for models of other kinds, and where no layers are found."""
    check_decoder(model.config)
    config = model.config.get_text_config()
    depth, width = config.num_hidden_layers, config.hidden_size
    lists = dict(_module_lists(model))
    found = [name for name, layers in lists.items() if len(layers) == depth and _are_alike(layers)]
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    head = model.get_output_embeddings()
    if len(outer) != 1 or head is None:
        raise _not_found(model, depth, lists, outer)
    (name,) = outer
    around = model.get_submodule(name.rpartition(".")[0])
    return DecoderParts(lists[name], name, _last_norm(around, width), head, model.get_input_embeddings(), width)


def check_decoder(config: PretrainedConfig) -> None:
    """Refuse the configuration of a model that does not predict the next token from those before it alone."""
    name = f"'{config.model_type}'"
    todo = "Use a decoder, such as a Llama, Mistral, Qwen, Phi-3, GPT-2 or GPT-NeoX model."
    if config.is_encoder_decoder:
        raise BraidError(f"this is an encoder and a decoder ({name}); gates are for a decoder alone", todo=todo)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise BraidError(f"this is an encoder ({name}), in which tokens see those after them", todo=todo)


def layers_in(model: Any) -> list[nn.Module]:
    """The layers of a decoder or of a Braid model, in order."""
    if isinstance(model, BraidForCausalLM):
        return [layer for stage in model.model.stages for layer in layers_of(stage)]
    return list(find_parts(model).layers)


def _module_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            yield name, module


def _are_alike(layers: nn.ModuleList) -> bool:
    """Whether all are of one class, by its name: gates and FSDP make other classes of the layers that they change."""
    return len({type(layer).__name__ for layer in layers}) == 1


def _last_norm(around: nn.Module, width: int) -> nn.Module:
    """The last part beside the layers that holds nothing but vectors of the stream's width."""
    norm: nn.Module = nn.Identity()
    for child in around.children():
        shapes = {tuple(parameter.shape) for parameter in child.parameters()}
        if shapes == {(width,)}:
            norm = child
    return norm


def _not_found(model: PreTrainedModel, depth: int, lists: dict[str, nn.ModuleList], found: list[str]) -> BraidError:
    name = type(model).__name__
    if found and model.get_output_embeddings() is None:
        what = f"{name} has layers but no head that predicts tokens"
        return BraidError(what, todo="Open it with AutoModelForCausalLM.")
    seen = [f"{name} ({len(layers)} x {_classes(layers)})" for name, layers in lists.items() if len(layers)]
    what = "several lists of modules could be" if found else "no list of modules is"
    return BraidError(
        f"the layers of {name} cannot be told: its configuration says {depth}, and {what} that many of one class; "
        f"found: {', '.join(seen) or 'no list of modules at all'}",
    )


def _classes(layers: nn.ModuleList) -> str:
    return " or ".join(sorted({type(layer).__name__ for layer in layers}))
