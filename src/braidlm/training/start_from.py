"""The model that a run starts from: a Braid model (`start_from`) or a decoder of transformers (`decoder`).

Its tokenizer prepares the data; what cannot be trained is refused before anything is loaded.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from braidlm.core.differences import changes, with_changes
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import check_vocabulary
from braidlm.core.models.memory import check_training_fits, training_plan
from braidlm.data.loading.config import DataConfig, TokenizerConfig
from braidlm.data.loading.open_data import OpenData
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.tokenizer import BraidTokenizer, differences
from braidlm.model.compression.compression import untrainable
from braidlm.model.config.architecture import Architecture
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.adapter import read_adapter
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.decoder import OpenedDecoder
from braidlm.opening.gating import gates_of
from braidlm.opening.names import find_or_fetch
from braidlm.opening.open import open_model
from braidlm.opening.opened_model import find_tokenizer
from braidlm.training.config import TrainingConfig
from braidlm.training.lora import DecoderLora
from braidlm.training.recipe import LoadedRecipe, Recipe
from braidlm.training.step.compute import choose_dtype
from braidlm.training.step.objective import use_routing_losses
from braidlm.training.trainables.decoder import TrainableDecoder

TRAINING_ONLY = ("dropout", "initialisation", "losses", "temperature")
"""Options of an architecture that change how it is trained and not what it computes."""


def data_of(recipe: Recipe) -> DataConfig:
    """A recipe's data; text is prepared with the tokenizer of the model to start from, or else of the first teacher:
    both fit no other tokens."""
    has_packed = any(data_set.path is not None for data_set in recipe.data.sets.values())
    if has_packed:  # they bring their tokenizer, which is compared when it is read
        return recipe.data
    if recipe.start_from is None and recipe.decoder is None:
        distill = recipe.training.distill
        if distill is None or recipe.data.tokenizer != TokenizerConfig():
            return recipe.data
        return replace(
            recipe.data, tokenizer=TokenizerConfig(str(find_or_fetch(distill.teachers[0].model, bare=True)[0]))
        )
    start, asked = _tokenizer_folder(recipe), recipe.data.tokenizer
    own = find_tokenizer(start)
    if own is not None and asked == TokenizerConfig():
        return replace(recipe.data, tokenizer=TokenizerConfig(str(start)))
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
    return recipe.data


def _tokenizer_folder(recipe: Recipe) -> Path:
    """The folder of the model to start from; of adapters without a tokenizer, that of their base."""
    if recipe.start_from is not None:
        return open_model(recipe.start_from, "braid").folder
    decoder = open_decoder(recipe)
    while find_tokenizer(decoder.folder) is None and decoder.base is not None:
        decoder = decoder.base
    return decoder.folder


def load_start(start: OpenedBraid, loaded: LoadedRecipe, data: OpenData) -> BraidForCausalLM:
    """The model's weights, in its own architecture or in one that differs only in how it is trained."""
    config, where = start.config, str(start.folder)
    check_vocabulary(config.vocab_size, data.tokenizer, where)
    if own := find_tokenizer(start.folder):  # one without, as a conversion may leave, cannot be compared
        check_same_tokenizer(start.folder, own, data.tokenizer)
    if loaded.architecture is not None:
        wanted = BraidConfig(architecture=loaded.architecture, vocab_size=loaded.vocab_size or config.vocab_size)
        own_parts, parts = _what_it_computes(config.architecture), _what_it_computes(wanted.architecture)
        changed = list(changes(own_parts, parts, "model"))
        if config.vocab_size != wanted.vocab_size:
            changed.append(f"model.vocab_size: {config.vocab_size} -> {wanted.vocab_size}")
        if changed:
            raise BraidError(
                with_changes("the model to start from has another shape (the model's -> the recipe's)", changed),
                where,
                "Leave out `model` to use the folder's own architecture; `~model` on the command line removes it.",
            )
        config.architecture = wanted.architecture
    check_length(config.max_position_embeddings, loaded.recipe.data.length)
    use_routing_losses(config, loaded.recipe.training.routing_losses)
    model: BraidForCausalLM = start.load()
    return model


def check_not_quantised(architecture: Architecture, where: str) -> None:
    """Refuse a model whose weights are whole numbers, which training cannot change."""
    if kinds := untrainable(architecture.compression):
        raise BraidError(
            f"this model is quantised ({', '.join(kinds)}), and whole numbers cannot be trained",
            where,
            "Train the model that it was made of, and quantise the result: `braid edit quantize`.",
        )


def check_length(context: int, length: int) -> None:
    """Refuse sequences that are longer than the model's context."""
    if length > context:
        raise BraidError(
            f"data.length is {length} and the model's context only {context}",
            todo="Raise model.context or lower data.length.",
        )


def check_same_tokenizer(start: Path, own: BraidTokenizer, other: BraidTokenizer) -> None:
    """Refuse data that was packed with another tokenizer than the model's."""
    if own.fingerprint != other.fingerprint:
        raise BraidError(
            f"the data has another tokenizer than the model to start from: {'; '.join(differences(own, other))}",
            str(start),
            f"Prepare the data with the model's: `braid prepare SOURCE --tokenizer {start} --out DIR`; or give the "
            "text as `source` without data.tokenizer, which does the same.",
        )


def _what_it_computes(architecture: Any) -> Any:
    """An architecture without options that matter in training only."""
    if isinstance(architecture, dict):
        kept = {k: v for k, v in architecture.items() if k not in TRAINING_ONLY}
        return {k: _what_it_computes(v) for k, v in kept.items()}
    return [_what_it_computes(v) for v in architecture] if isinstance(architecture, list) else architecture


def open_decoder(recipe: Recipe) -> OpenedDecoder:
    """The decoder that a recipe trains."""
    return open_model(str(recipe.decoder), "transformers", bare=True)


def plan_decoder_run(recipe: Recipe, device: torch.device) -> str:
    """Find a decoder that cannot be trained before its data is prepared; gives what its training needs, in words."""
    source, training = open_decoder(recipe), recipe.training
    if source.context is not None:
        check_length(source.context, recipe.data.length)
    if source.has_gates and source.has_lora and not _trains_base(training):
        raise BraidError(
            "this folder holds gates and LoRA adapters that were trained together",
            str(source.folder),
            "training.train=all trains on from it, and makes a whole model of it.",
        )
    model = source.skeleton(weights_dtype(training, device))
    freeze_decoder(model, source, training)
    if training.lora is not None:
        DecoderLora(model, training.lora, source.address)
    check_training_fits(model, device)
    return training_plan(model, device)


def make_decoder(recipe: Recipe, data: OpenData, device: torch.device) -> TrainableDecoder:
    """The decoder in memory, in which what the recipe asks for is trained."""
    source, training = open_decoder(recipe), recipe.training
    check_vocabulary(source.config.get_text_config().vocab_size, data.tokenizer, str(source.folder))
    check_same_tokenizer(source.folder, source.tokenizer, data.tokenizer)
    model = source.load(device, weights_dtype(training, device))
    freeze_decoder(model, source, training)
    if training.lora is None:
        return TrainableDecoder(model, source)
    base = read_adapter(source.folder).base if source.has_gates else source.address
    return TrainableDecoder(model, source, DecoderLora(model, training.lora, base))


def weights_dtype(training: TrainingConfig, device: torch.device) -> torch.dtype:
    """The type of the decoder's own weights; what is trained beside a frozen decoder is in float32 in any case."""
    if training.precision == "pure_bf16":
        return torch.bfloat16
    if _trains_base(training) or device.type == "cpu":
        return torch.float32
    return choose_dtype(training.precision, device)


def freeze_decoder(model: PreTrainedModel, source: OpenedDecoder, training: TrainingConfig) -> None:
    """Let only what the recipe asks for have gradients; LoRA's adapters, which come later, have them.

    Beside these, gates are trained that are adapters themselves; those of a whole folder are part of the base.
    """
    if training.train == "gates" or (training.lora is not None and source.has_gates):
        train_gates_alone(model)
    elif training.lora is not None:
        model.requires_grad_(False)


def train_gates_alone(model: PreTrainedModel) -> None:
    """Freeze everything but the gates of a decoder or of a Braid model."""
    gates = gates_of(model)
    if not gates:
        raise BraidError(
            "training.train is gates, and the model has none",
            model.name_or_path or None,
            "Add some: `braid edit gate MODEL --out DIR`, and name that folder.",
        )
    model.requires_grad_(False)
    for gate in gates.values():
        gate.requires_grad_(True)


def _trains_base(training: TrainingConfig) -> bool:
    return training.train == "all" and training.lora is None
