"""The decoder that a run trains: checked and planned before anything is loaded, then loaded and frozen as asked."""

import torch
from transformers import PreTrainedModel

from braidlm.core.errors import BraidError
from braidlm.core.models.folders import check_vocabulary
from braidlm.core.models.memory import check_training_fits, training_plan
from braidlm.data.loading.open_data import OpenData
from braidlm.decoders.adapter import read_adapter
from braidlm.decoders.gating import gates_of
from braidlm.decoders.loading import OpenDecoder, open_decoder
from braidlm.training.config import TrainingConfig
from braidlm.training.recipe import Recipe
from braidlm.training.start_from import check_length, check_same_tokenizer
from braidlm.training.step.precision import choose_dtype
from braidlm.training.trainables.decoder import TrainableDecoder
from braidlm.training.trainables.decoder_lora import DecoderLora


def plan_decoder_run(recipe: Recipe, device: torch.device) -> str:
    """Find a decoder that cannot be trained before its data is prepared; gives what its training needs, in words."""
    source, training = open_decoder(str(recipe.decoder)), recipe.training
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
    source, training = open_decoder(str(recipe.decoder)), recipe.training
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


def freeze_decoder(model: PreTrainedModel, source: OpenDecoder, training: TrainingConfig) -> None:
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
