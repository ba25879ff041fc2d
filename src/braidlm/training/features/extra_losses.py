"""Extra losses: features that add something to the loss of the text.

An extra loss is one file in `features/losses/`, a class registered under its name and found by scanning; a recipe
lists those it wants, with their options:

    training:
      losses:
        - early_exit: {weight: 0.2}

It sees one forward pass (`TrainingPass`) and returns a number. It is a module: parameters of its own are trained with
the model's, and with its buffers saved in the run's state, never in the model's folder. With extra losses the step
runs the model's plain pass, which keeps what they read; kernels keep less. One kind alone runs in the lowered pass:
a divergence from soft targets, which the head's kernel computes with the loss of the text (`has_soft_targets`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.data.loading.config import DataConfig
from braidlm.data.tokenizing.tokenizer import BraidTokenizer
from braidlm.kernels.ops.soft_head_loss import SoftTargets
from braidlm.model.config.ranges import NonNegative
from braidlm.model.config.registry import Choice, Registry
from braidlm.model.config.strict import PartOf
from braidlm.model.language_model import LanguageModel
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.step.spread import put

extra_losses = Registry("extra loss")


@dataclass
class ExtraLossConfig:
    """The option of every extra loss."""

    weight: NonNegative = 1.0
    """Its factor in the sum of all losses."""


@dataclass(frozen=True)
class TrainingPass:
    """One forward pass over a micro-batch."""

    model: LanguageModel
    inputs: Tensor  # [batch, time] token ids
    labels: Tensor  # [batch, time]: the token that each position predicts, or IGNORED
    count: Tensor
    """The number of labels in the whole batch: of all micro-batches and processes. A mean over tokens is a sum divided
    by it, so that the micro-batches' losses add up to the batch's."""
    hidden: Tensor  # [batch, time, width]: the normalised stream
    layers: tuple[Tensor, ...] = ()
    """The embedded tokens and the stream after each layer, the last one normalised; where `needs_layers`."""
    taken: "TrainingPass | None" = None
    """The rows that a loss has taken for itself (`taken_rows`), which are not in this pass."""
    read: dict[str, Tensor] = field(default_factory=dict)
    """What the head has read in the text beside the stream, by the names of its arguments."""


class ExtraLoss(Feature, nn.Module):
    """The base class: `forward` gives the loss of a pass, without its weight."""

    Config: Any = ExtraLossConfig
    kind: str = ""  # its name among the losses of a run
    file = "losses.safetensors"
    for_decoders = False
    needs_layers: ClassVar[bool] = False  # whether it reads the stream after each layer
    text_weight: float = 1.0
    """The factor of the text's own loss in the sum of all losses, where this one takes a share of its place."""
    taken_rows: int = 0
    """How many rows of each micro-batch, the last, are this loss's own: they see both ways, and the loss of the text,
    and other losses, are of the rows before them."""
    has_soft_targets: bool = False
    """Whether `forward` is a divergence from `soft_targets`, so that the lowered pass can compute it."""

    def __init__(self, config: Any, model: LanguageModel):
        super().__init__()
        self.config = config

    def forward(self, done: TrainingPass) -> Tensor:
        raise NotImplementedError("abstract: each extra loss computes its own")

    def soft_targets(self, inputs: Tensor) -> SoftTargets:
        """What the head learns beside the labels of token ids [batch, time]; where `has_soft_targets`."""
        raise NotImplementedError("abstract: only some losses have them")

    @property
    def plain_pass(self) -> bool:  # type: ignore[override]
        return not self.has_soft_targets

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

    def state(self) -> dict[str, Tensor]:
        return {f"{self.kind}.{name}": tensor for name, tensor in self.state_dict().items()}

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                put(tensor, saved[f"{self.kind}.{name}"])


@feature("training.losses")
class ExtraLosses(Feature):
    """The losses that a recipe lists."""

    for_decoders = False

    @dataclass
    class Keys:
        losses: list[Annotated[Choice, PartOf(extra_losses, by_key=True)]] = field(default_factory=list)
        """What is added to the loss of the text, each with its weight: `- early_exit: {weight: 0.2}`."""

    @classmethod
    def asked(cls, training: Any, data: DataConfig | None) -> dict[str, type[Feature]]:
        listed = {f"the loss '{choice.kind}'": extra_losses[choice.kind] for choice in training.losses}
        return {cls.name: cls, **listed} if listed else {}

    @classmethod
    def problems(cls, training: Any, data: DataConfig) -> Iterable[BraidError]:
        counts = Counter(choice.kind for choice in training.losses)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            yield BraidError(f"training.losses: '{twice[0]}' is listed twice")

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        if not isinstance(setup.model, LanguageModel):
            return []
        made = build_extra_losses(setup.training.losses, setup.model)
        for loss in made.values():
            loss.begin_run(setup.training.batch, setup.seed)
            if setup.opened is not None:
                loss.read_tokenizer(setup.opened.tokenizer)
        return list(made.values())


def build_extra_losses(choices: Sequence[Choice], model: LanguageModel) -> dict[str, ExtraLoss]:
    """The losses of a recipe, by name."""
    device = next(model.parameters()).device
    built = {choice.kind: extra_losses.build(choice, model).to(device).train() for choice in choices}
    for kind, loss in built.items():
        loss.kind = kind
    return built
