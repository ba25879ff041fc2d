"""The model that a run starts from: a Braid model (`start_from`) or a decoder of transformers (`decoder`).

Its tokenizer prepares the data; what cannot be trained is refused before anything is loaded.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from braidlm.core import console
from braidlm.core.differences import changes, with_changes
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import check_vocabulary
from braidlm.data.loading.config import DataConfig, TokenizerConfig
from braidlm.data.loading.open_data import OpenData
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, differences
from braidlm.model.compression import untrainable
from braidlm.model.config.braid_config import Architecture, BraidConfig
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gating import MEMBERS, gates_of
from braidlm.opening.names import find_or_fetch
from braidlm.opening.open import open_model
from braidlm.opening.opened_model import find_tokenizer
from braidlm.training.recipe import LoadedRecipe, Recipe

if TYPE_CHECKING:
    from braidlm.model.modeling_braid import BraidForCausalLM

TRAINING_ONLY = ("dropout", "initialisation", "losses", "temperature")
"""Options of an architecture that change how it is trained and not what it computes."""


def data_of(recipe: Recipe) -> DataConfig:
    """A recipe's data; text is prepared with the tokenizer of the model to start from, or else of the first teacher:
    both fit no other tokens."""
    data, asked, distill = recipe.data, recipe.data.tokenizer, recipe.training.distill
    if any(data_set.path is not None for data_set in data.sets.values()):
        return data  # what is packed brings its tokenizer, which is compared when it is read
    if recipe.start_from is None and recipe.decoder is None:
        if distill is None or asked != TokenizerConfig():
            return data
        teacher, *_ = find_or_fetch(distill.teachers[0].model, bare=True)
        return replace(data, tokenizer=TokenizerConfig(str(teacher)))
    start = _tokenizer_folder(recipe)
    own = find_tokenizer(start)
    if own is not None and asked == TokenizerConfig():
        return replace(data, tokenizer=TokenizerConfig(str(start)))
    if asked.kind == "bpe":
        what = "has none that could be used instead" if own is None else "has its own, and its weights fit no other"
        raise BraidError(
            f"data.tokenizer asks for a new tokenizer, and the model to start from {what}",
            str(start),
            "Name the tokenizer that the model was trained with: data.tokenizer=DIR."
            if own is None
            else "Use the model's (`data.tokenizer=null`), or leave out start_from to train a new model.",
        )
    if own is not None:
        check_same_tokenizer(start, own, load_tokenizer(asked.kind))
    return data


def _tokenizer_folder(recipe: Recipe) -> Path:
    """The folder of the model to start from; of adapters without a tokenizer, that of their base."""
    if recipe.start_from is not None:
        return open_model(recipe.start_from, "braid").folder
    decoder = open_decoder(recipe)
    while find_tokenizer(decoder.folder) is None and decoder.base is not None:
        decoder = decoder.base
    return decoder.folder


def load_start(start: OpenedBraid, loaded: LoadedRecipe, data: OpenData) -> "BraidForCausalLM":
    """The model's weights, in its own architecture or in one that differs only in how it is trained."""
    config, where = start.config, str(start.folder)
    check_vocabulary(config.vocab_size, data.tokenizer, where)
    if own := find_tokenizer(start.folder):  # one without, as a conversion may leave, cannot be compared
        check_same_tokenizer(start.folder, own, data.tokenizer)
    if loaded.architecture is not None:
        wanted = BraidConfig(architecture=loaded.architecture, vocab_size=loaded.vocab_size or config.vocab_size)
        own_parts, parts = (
            _changed(each.architecture, lambda part: {k: v for k, v in part.items() if k not in TRAINING_ONLY})
            for each in (config, wanted)
        )
        changed = list(changes(own_parts, parts, "model"))
        if config.vocab_size != wanted.vocab_size:
            changed.append(f"model.vocab_size: {config.vocab_size} -> {wanted.vocab_size}")
        if changed:
            what = with_changes("the model to start from has another shape (the model's -> the recipe's)", changed)
            todo = "Leave out `model` to use the folder's own architecture; `~model` on the command line removes it."
            raise BraidError(what, where, todo)
        config.architecture = wanted.architecture
    check_length(config.max_position_embeddings, loaded.recipe.data.length)
    use_routing_losses(config, loaded.recipe.training.routing_losses)
    model: BraidForCausalLM = start.load()
    return model


def check_not_quantised(architecture: Architecture, where: str) -> None:
    """Refuse a model whose weights are whole numbers, which training cannot change."""
    if kinds := untrainable(architecture.compression):
        what = f"this model is quantised ({', '.join(kinds)}), and whole numbers cannot be trained"
        todo = "Train the model that it was made of, and quantise the result: `braid edit quantize`."
        raise BraidError(what, where, todo)


def check_length(context: int, length: int) -> None:
    """Refuse sequences that are longer than the model's context."""
    if length > context:
        what = f"data.length is {length} and the model's context only {context}"
        raise BraidError(what, todo="Raise model.context or lower data.length.")


def check_same_tokenizer(start: Path, own: BraidTokenizer, other: BraidTokenizer) -> None:
    """Refuse data that was packed with another tokenizer than the model's."""
    if own.fingerprint != other.fingerprint:
        raise BraidError(
            f"the data has another tokenizer than the model to start from: {'; '.join(differences(own, other))}",
            str(start),
            f"Prepare the data with the model's: `braid prepare SOURCE --tokenizer {start} --out DIR`; or give the "
            "text as `source` without data.tokenizer, which does the same.",
        )


def use_routing_losses(config: BraidConfig, losses: dict[str, float] | None) -> None:
    """Give every router of a model to be built these losses in place of its own."""
    if losses is not None:
        before, given = config.architecture, {"losses": dict(losses)}
        config.architecture = _changed(before, lambda part: {**part, **given} if "losses" in part else part)
        if losses and _changed(before, lambda part: {} if "losses" in part else part) == before:
            console.warn("training.routing_losses has no effect: the model has no routers")


def _changed(part: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """An architecture, or a part of one, in which every mapping is what `change` makes of it."""
    if isinstance(part, dict):
        return {key: _changed(value, change) for key, value in change(part).items()}
    return [_changed(value, change) for value in part] if isinstance(part, list) else part


def open_decoder(recipe: Recipe) -> OpenedDecoder:
    """The decoder that a recipe trains."""
    opened = open_model(str(recipe.decoder), "transformers", bare=True)
    if opened.kind == MEMBERS:
        what = f"members ({', '.join(opened.config.names)}) are not trained together"
        raise BraidError(what, opened.title, "Train each and compose again, or distil them: `training.distill`.")
    return opened


def train_gates_alone(model: "transformers.PreTrainedModel") -> None:
    """Freeze everything but the gates of a decoder or of a Braid model."""
    gates = gates_of(model)
    if not gates:
        todo = "Add some: `braid edit gate MODEL --out DIR`, and name that folder."
        raise BraidError("training.train is gates, and the model has none", model.name_or_path or None, todo)
    model.requires_grad_(False)
    for gate in gates.values():
        gate.requires_grad_(True)
