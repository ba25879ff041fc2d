"""What trains is a protocol: a batch in, a report of losses out; and Braid's own models, which keep it.

The loop, the step, checkpoints and validation know a model only by this contract. Whatever keeps it is trained with
the same budgets, schedules, checkpoints and metrics: Braid's models, and decoders of transformers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from braidlm.core.decoding.decoder import Decoder, Sampling
from braidlm.core.decoding.generation import Piece, continue_text
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.core.models.adapters import adaptable
from braidlm.core.models.folders import WEIGHTS, write_around_weights, write_model_files, write_record
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.kernels.lower import lower, replace_parts
from braidlm.kernels.side_stream import SideStream
from braidlm.training.features.extra_losses import ExtraLoss
from braidlm.training.lora import Adapter
from braidlm.training.saving.shards import write_whole
from braidlm.training.step.objective import Objective
from braidlm.training.step.spread import whole_view

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.lowered_model import LoweredModel
    from braidlm.model.modeling_braid import BraidForCausalLM


class Trainable(ABC):
    """The contract. What has a default is what only some models have."""

    model: "transformers.PreTrainedModel"  # the model, whose parameters with `requires_grad` are trained
    capturable: bool = True
    """Whether its passes never wait for the device, so that a step can be replayed as a graph."""
    compiled_by_default: bool = True  # whether torch.compile is known to serve it

    @abstractmethod
    def objective(self, lowered: "LoweredModel | None" = None, extra: Mapping[str, ExtraLoss] = {}) -> nn.Module:
        """A module from inputs, labels and the count of labels in the whole batch to `BatchLosses`."""

    @abstractmethod
    def text_loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The sum of the labels' losses in nats, each at the position that predicts it."""

    @abstractmethod
    def flops_per_token(self, length: int) -> int:
        """What a forward pass over sequences of `length` costs for each token."""

    @abstractmethod
    def write(self, folder: Path, tokenizer: BraidTokenizer | None, lineage: dict[str, Any], name: str) -> None:
        """Write a model folder that every verb opens, and from which `read` restores what was trained."""

    @abstractmethod
    def read(self, folder: Path) -> None:
        """Take the trained weights of a folder that `write` wrote."""

    def spread_weights(self) -> dict[str, Tensor]:
        """What a folder's file of weights holds, by name, where processes can write and read it in parts; they do not
        call `write` and `read` then, which need whole weights."""
        return {}

    def write_around_weights(self, folder: Path, tokenizer: BraidTokenizer | None, name: str) -> None:
        """The files of a folder that do not depend on its weights."""
        raise NotImplementedError("abstract: only where processes write weights in parts")

    def write_weights(
        self, folder: Path, shards: Path, tokenizer: BraidTokenizer | None, lineage: dict[str, Any], name: str
    ) -> None:
        """The file of weights from parts that processes wrote, and what records it; training goes on meanwhile."""
        raise NotImplementedError("abstract: only where processes write weights in parts")

    @abstractmethod
    def matrices(self) -> list[nn.Parameter]:
        """The matrices between embedding and head, and banks of them, but for those of routers."""

    @abstractmethod
    def units(self) -> list[nn.Module]:
        """Modules that are called one after the other, inner ones first: where weights are spread over processes, those
        of one unit are gathered together."""

    def continue_text(
        self, tokenizer: BraidTokenizer, prompts: Sequence[str], max_tokens: int, sampling: Sampling
    ) -> Iterator[Piece]:
        """Texts of the model, piece by piece."""
        return continue_text(self.model, tokenizer, prompts, max_tokens, sampling)

    def checkpoint_activations(self) -> None:
        """Recompute layers in the backward pass from now on."""
        self.model.gradient_checkpointing_enable()

    def lower(self, dtype: torch.dtype, side: SideStream | None, compile_plain: bool) -> "LoweredModel | None":
        """The model by kernels, where there are some for it."""
        return None


class TrainableBraid(Trainable):
    """A Braid model whose own weights are trained, or an adapter on it."""

    model: "BraidForCausalLM"

    def __init__(self, model: "BraidForCausalLM", adapter: Adapter | None = None):
        self.model, self.adapter = model, adapter

    def objective(self, lowered: "LoweredModel | None" = None, extra: Mapping[str, ExtraLoss] = {}) -> Objective:
        if lowered is None:
            replace_parts(self.model)
        return Objective(self.model, lowered, extra)

    def text_loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.model.text_loss(inputs, labels, 1.0)

    def matrices(self) -> list[nn.Parameter]:
        return [self.model.get_submodule(name).weight for name in adaptable(self.model)]  # type: ignore[misc]

    def units(self) -> list[nn.Module]:
        return [part for stage in self.model.model.stages for part in (*getattr(stage, "layers", ()), stage)]

    def flops_per_token(self, length: int) -> int:
        return model_cost(self.model, length).flops_per_token

    def continue_text(
        self, tokenizer: BraidTokenizer, prompts: Sequence[str], max_tokens: int, sampling: Sampling
    ) -> Iterator[Piece]:
        # A captured graph would hold memory that the training needs, and the texts are too short to benefit.
        eager = partial(Decoder, graph=False)
        return continue_text(self.model, tokenizer, prompts, max_tokens, sampling, make_decoder=eager)

    def write(self, folder: Path, tokenizer: BraidTokenizer | None, lineage: dict[str, Any], name: str) -> None:
        """A complete model folder; where an adapter is trained, merged, and alone in adapter/."""
        saved = self.model if self.adapter is None else self.adapter.merged()
        write_model_files(saved, folder, tokenizer, lineage, name)
        if self.adapter is not None:
            self.adapter.write(folder)

    def spread_weights(self) -> dict[str, Tensor]:
        if self.adapter is not None:
            return {}
        parameters = dict(self.model.named_parameters())
        tensors = {n: tensor for n, tensor in self.model.state_dict().items() if n not in self.model.tied}
        return {name: whole_view(tensor, parameters.get(name, tensor)) for name, tensor in tensors.items()}

    def write_around_weights(self, folder: Path, tokenizer: BraidTokenizer | None, name: str) -> None:
        write_around_weights(self.model, folder, tokenizer, name)
        self.model.save_pretrained(folder, state_dict={})

    def write_weights(
        self, folder: Path, shards: Path, tokenizer: BraidTokenizer | None, lineage: dict[str, Any], name: str
    ) -> None:
        write_whole(shards, folder / WEIGHTS)
        write_record(skeleton(self.model.config), folder, tokenizer, lineage, name)

    def read(self, folder: Path) -> None:
        if self.adapter is not None:
            self.adapter.read(folder)
            return
        keys = self.model.load_state_dict(load_file(folder / WEIGHTS, device=str(self.model.device)), strict=False)
        missing = [name for name in keys.missing_keys if name not in self.model.tied]
        if missing or keys.unexpected_keys:
            raise BraidError(f"checkpoint {folder.name} is of another model", str(folder.parent), "Begin a new run.")

    def lower(self, dtype: torch.dtype, side: SideStream | None, compile_plain: bool) -> "LoweredModel | None":
        return lower(self.model, dtype, side, compile_plain=compile_plain)


def trainable_parameters(model: nn.Module) -> int:
    """How many parameters training changes; of a bank that is partly frozen, those of the other members."""
    counts = {
        parameter: parameter[rows].numel() if (rows := getattr(module, "trained_rows", None)) else parameter.numel()
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }  # a tied one counts once
    return sum(counts.values())
