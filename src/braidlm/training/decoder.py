"""A decoder of transformers in the training loop: as it is, with gates, or under LoRA."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from braidlm.core.devices import check_training_fits, training_plan
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.core.models.folders import check_vocabulary, write_lineage
from braidlm.data.loading.open_data import OpenData
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.model.heads.losses import IGNORED, next_token_loss, share_of_batch
from braidlm.opening.decoder import OpenedDecoder, cost_rows
from braidlm.opening.gated_folders import (
    GATES,
    gate_tensors,
    read_adapter,
    write_adapter_card,
    write_adapter_files,
    write_whole_files,
)
from braidlm.opening.gating import find_parts, gates_of
from braidlm.training.features.extra_losses import ExtraLoss
from braidlm.training.lora import DecoderLora, check_same_base, layer_matrices
from braidlm.training.recipe import Recipe, TrainingConfig
from braidlm.training.start_from import check_length, check_same_tokenizer, open_decoder, train_gates_alone
from braidlm.training.step.compute import choose_dtype
from braidlm.training.step.objective import BatchLosses
from braidlm.training.trainable import Trainable

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.lowered_model import LoweredModel


class TrainableDecoder(Trainable):
    """A decoder whose parameters, or gates alone, or adapters are trained."""

    capturable = False  # masks of transformers may be made by looking at the device
    compiled_by_default = False

    def __init__(self, model: "transformers.PreTrainedModel", source: OpenedDecoder, lora: DecoderLora | None = None):
        """`source` is what the model was loaded from: the base of what is saved, where that is frozen."""
        self.model, self.source, self.lora = model, source, lora
        gated = {parameter for gate in gates_of(model).values() for parameter in gate.parameters()}
        trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
        trains_base = lora is None and not trained <= gated
        self.is_whole = trains_base or (not trained.isdisjoint(gated) and not source.has_gates)
        """Whether what is saved is the whole decoder, and not adapters that name their base."""

    def objective(self, lowered: "LoweredModel | None" = None, extra: Mapping[str, ExtraLoss] = {}) -> nn.Module:
        return DecoderObjective(self.model)

    def text_loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return next_token_loss(self.model(input_ids=inputs, use_cache=False, return_dict=True).logits, labels, 1.0)

    def matrices(self) -> list[nn.Parameter]:
        return [module.weight for module in layer_matrices(self.model).values()]  # type: ignore[misc]

    def units(self) -> list[nn.Module]:
        return list(find_parts(self.model).layers)

    def flops_per_token(self, length: int) -> int:
        return sum(cost.flops_per_token for cost in cost_rows(self.model, length).values())

    def checkpoint_activations(self) -> None:
        # The other kind of checkpoint gives no gradients to a layer whose input has none, as behind a frozen base.
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def write(self, folder: Path, tokenizer: BraidTokenizer | None, lineage: dict[str, Any], name: str) -> None:
        """Adapters that name their base, where that is frozen; else a complete folder of transformers."""
        if self.is_whole:
            write_whole_files(self.model, folder, lineage, name, tokenizer)
            return
        if self.source.has_gates:
            base = read_adapter(self.source.folder)
            write_adapter_files(self.model, folder, base.base, base.base_sha256, lineage, name, tokenizer)
        if tokenizer is not None:
            tokenizer.save(folder)
        if self.lora is None:
            return  # gates have written their own lineage and card
        self.lora.write(folder)
        hashes = {path.name: sha256_of(path) for path in sorted(folder.glob("*.safetensors"))}
        record = write_lineage(folder, tokenizer, lineage, {"files": hashes})
        write_adapter_card(folder, name, record, self.source.address)

    @torch.no_grad()
    def read(self, folder: Path) -> None:
        if self.is_whole:
            # Transformers converts names on the way, so that its own reader is what reads its folders.
            self.model.load_state_dict(OpenedDecoder(folder).load("cpu", self.model.dtype).state_dict())
        else:
            check_same_base(folder, self.source.record())
            if self.source.has_gates:
                saved, own = load_file(folder / GATES), gate_tensors(self.model)
                if saved.keys() != own.keys():
                    raise BraidError("these gates are of other layers", str(folder), "Begin a new run.")
                for name, parameter in own.items():
                    parameter.copy_(saved[name])
        if self.lora is not None:
            self.lora.read(folder)


class DecoderObjective(nn.Module):
    """The decoder as a function of a batch."""

    def __init__(self, model: "transformers.PreTrainedModel"):
        super().__init__()
        self.model = model
        self.weight = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
        """The weight of the balance loss of a decoder's own experts."""
        # A sparse decoder's configuration gives the weight, but asks for no loss: generation fails with
        # `output_router_logits`. Training asks for it.
        self.asked = {"output_router_logits": True} if self.weight else {}

    def forward(self, inputs: Tensor, labels: Tensor, count: Tensor) -> BatchLosses:
        output = self.model(input_ids=inputs, use_cache=False, return_dict=True, **self.asked)
        balance = getattr(output, "aux_loss", None)
        routing = None
        if isinstance(balance, Tensor):
            routing = self.weight * balance * share_of_batch(labels != IGNORED, count)
        return BatchLosses(next_token_loss(output.logits, labels, count), routing, {}, {})


def plan_decoder_run(recipe: Recipe, device: torch.device) -> str:
    """Find a decoder that cannot be trained before its data is prepared; gives what its training needs, in words."""
    source, training = open_decoder(recipe), recipe.training
    if source.context is not None:
        check_length(source.context, recipe.data.length)
    if source.has_gates and source.has_lora and not _trains_base(training):
        what = "this folder holds gates and LoRA adapters that were trained together"
        todo = "training.train=all trains on from it, and makes a whole model of it."
        raise BraidError(what, str(source.folder), todo)
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


def freeze_decoder(model: "transformers.PreTrainedModel", source: OpenedDecoder, training: TrainingConfig) -> None:
    """Let only what the recipe asks for have gradients; LoRA's adapters, which come later, have them. Beside these,
    gates are trained that are adapters themselves; those of a whole folder are part of the base."""
    if training.train == "gates" or (training.lora is not None and source.has_gates):
        train_gates_alone(model)
    elif training.lora is not None:
        model.requires_grad_(False)


def _trains_base(training: TrainingConfig) -> bool:
    return training.train == "all" and training.lora is None
