"""A recipe's `training.distill`: who teaches, and how much of the loss is theirs."""

from dataclasses import dataclass
from typing import Annotated, Any

from braidlm.core.errors import BraidError
from braidlm.model.config.ranges import NonNegative, Positive, Range, Share

TopK = Annotated[int, Range(at_least=1, at_most=65_536)]


@dataclass
class TeacherConfig:
    """A model that teaches."""

    model: str
    """A model folder, a run, or a name on the Hub: any causal language model with the data's tokenizer."""
    weight: Positive = 1.0
    """Its share of the averaged probabilities, relative to those of the other teachers."""

    @classmethod
    def from_shorthand(cls, model: Any) -> dict[str, Any]:
        return {"model": model}


@dataclass
class DistillConfig:
    """Knowledge distillation: the model learns the probabilities of frozen teachers beside the text."""

    teachers: list[TeacherConfig]
    """Names of models, or {model, weight}; the probabilities of several are averaged."""
    weight: Share = 0.5
    """The teachers' share of the loss: weight x temperature^2 x KL(teachers || model), and 1 - weight of the text's."""
    temperature: Positive = 1.0
    """Divides the logits of both sides; above 1, improbable tokens teach more, and short trainings learn less."""
    hidden: NonNegative = 0.0
    """Adds this weight x the mean squared difference of the last hidden states, each normalised; where widths differ, a
    projection is learned beside the model. 0: not compared."""
    top_k: TopK | None = None
    """Store the teachers' most probable tokens of every position, this many, in the data section's `cache` before the
    training, and learn from those; all other tokens are one event. By default teachers run in every step."""

    def __post_init__(self) -> None:
        if not self.teachers:
            raise BraidError("teachers: name at least one model")
        if self.top_k is not None and self.hidden:
            raise BraidError(
                "`hidden` compares states that are not stored",
                todo="Leave out `top_k` to run the teachers in every step, or `hidden`.",
            )
