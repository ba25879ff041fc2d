"""What trains is a protocol: a batch in, a report of losses out.

The loop, the step, checkpoints and validation know a model only by this contract. Whatever keeps it is trained with
the same budgets, schedules, checkpoints and metrics: Braid's models, and decoders of transformers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from braidlm.core.decoding.decoder import Sampling
from braidlm.core.decoding.generation import Piece, continue_text
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.kernels.side_stream import SideStream
from braidlm.training.features.extra_losses import ExtraLoss

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.lowered_model import LoweredModel


class Trainable(ABC):
    """The contract. What has a default is what only some models have."""

    model: PreTrainedModel
    """The model, whose parameters with `requires_grad` are trained."""
    capturable: bool = True
    """Whether its passes never wait for the device, so that a step can be replayed as a graph."""
    compiled_by_default: bool = True
    """Whether torch.compile is known to serve it."""

    @abstractmethod
    def objective(
        self, lowered: "LoweredModel | None" = None, extra: Mapping[str, ExtraLoss] | None = None
    ) -> nn.Module:
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

    def matrices(self) -> list[nn.Parameter]:
        """The matrices between embedding and head, and banks of them, but for those of routers."""
        return []

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
