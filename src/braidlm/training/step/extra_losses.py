"""The contract of extra losses: what a recipe adds to the loss of the text.

An extra loss is one file in `training/losses/`, a class registered under its name and found by scanning; a recipe
lists those it wants, with their options:

    training:
      losses:
        - early_exit: {weight: 0.2}

It sees one forward pass (`TrainingPass`) and returns a number. It is a module: parameters of its own are trained with
the model's, and with its buffers saved in the run's state, never in the model's folder. With extra losses the step
runs the model's plain pass, which keeps what they read; kernels keep less. One kind alone runs in the lowered pass:
a divergence from soft targets, which the head's kernel computes with the loss of the text (`has_soft_targets`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from braidlm.data.loading.batches import Batch
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.kernels.taught.soft_targets import SoftTargets
from braidlm.model.config.ranges import NonNegative
from braidlm.model.config.registry import Choice, Registry
from braidlm.model.modeling_braid import BraidForCausalLM

extra_losses = Registry("extra loss")


@dataclass
class ExtraLossConfig:
    """The option of every extra loss."""

    weight: NonNegative = 1.0
    """Its factor in the sum of all losses."""


@dataclass(frozen=True)
class TrainingPass:
    """One forward pass over a micro-batch."""

    model: BraidForCausalLM
    inputs: Tensor
    """[batch, time] token ids."""
    labels: Tensor
    """[batch, time]: the token that each position predicts, or IGNORED."""
    count: Tensor
    """The number of labels in the whole batch: of all micro-batches and processes. A mean over tokens is a sum divided
    by it, so that the micro-batches' losses add up to the batch's."""
    hidden: Tensor
    """[batch, time, width]: the normalised stream."""
    layers: tuple[Tensor, ...] = ()
    """The embedded tokens and the stream after each layer, the last one normalised; where `needs_layers`."""
    taken: "TrainingPass | None" = None
    """The rows that a loss has taken for itself (`taken_rows`), which are not in this pass."""
    read: dict[str, Tensor] = field(default_factory=dict)
    """What the head has read in the text beside the stream, by the names of its arguments."""


class ExtraLoss(nn.Module):
    """The base class: `forward` gives the loss of a pass, without its weight."""

    Config: Any = ExtraLossConfig
    needs_layers: ClassVar[bool] = False
    """Whether it reads the stream after each layer."""
    text_weight: float = 1.0
    """The factor of the text's own loss in the sum of all losses, where this one takes a share of its place."""
    taken_rows: int = 0
    """How many rows of each micro-batch, the last, are this loss's own: they see both ways, and the loss of the text,
    and other losses, are of the rows before them."""
    capturable: bool = True
    """Whether it never waits for the device, so that a step with it can be replayed as a graph."""
    has_soft_targets: bool = False
    """Whether `forward` is a divergence from `soft_targets`, so that the lowered pass can compute it."""

    def __init__(self, config: Any, model: BraidForCausalLM):
        super().__init__()
        self.config = config

    def forward(self, done: TrainingPass) -> Tensor:
        raise NotImplementedError("abstract: each extra loss computes its own")

    def soft_targets(self, inputs: Tensor) -> SoftTargets:
        """What the head learns beside the labels of token ids [batch, time]; where `has_soft_targets`."""
        raise NotImplementedError("abstract: only some losses have them")

    @property
    def factor(self) -> float:
        """Its factor in the sum of all losses."""
        return self.config.weight  # type: ignore[no-any-return]

    def text_count(self, count: Tensor) -> Tensor:
        """The number of labels that the loss of the text is of, from that of the whole batch."""
        return count

    def begin_run(self, rows: int, seed: int) -> None:
        """Called once, before the first step: a micro-batch has `rows` rows in each process."""

    def read_tokenizer(self, tokenizer: BraidTokenizer) -> None:
        """Called once, before the first step."""

    def read_batch(self, batch: Batch) -> Batch:
        """Called before each step, after `begin_step`, with this process's rows; gives them as they are trained."""
        return batch

    def begin_step(self, step: int, share: float) -> bool:
        """Called before each step, with its number from 0 and the share of the training that is done.

        True if this changes what `forward` computes other than through tensors: a captured step is recorded again.
        """
        return False

    def readings(self) -> dict[str, float]:
        """Numbers that the run's metrics record beside the loss; it may wait for the device."""
        return {}

    def end_step(self) -> None:
        """Called after each update of the weights; must not wait for the device (it is part of a captured step)."""


def build_extra_losses(choices: Sequence[Choice], model: BraidForCausalLM) -> dict[str, ExtraLoss]:
    """The losses of a recipe, by name."""
    device = next(model.parameters()).device
    return {choice.kind: extra_losses.build(choice, model).to(device).train() for choice in choices}
