"""What the models return: transformers' outputs, with the routings beside them."""

from dataclasses import dataclass

from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from .routing.routing import Routings


@dataclass
class BodyOutput(BaseModelOutputWithPast):
    """Hidden states."""

    routings: Routings | None = None
    """Every router's choices, in the order of the stages; None if the model has no router."""


@dataclass
class LanguageOutput(CausalLMOutputWithPast):
    """Logits and, where labels were given, the loss."""

    routings: Routings | None = None


@dataclass
class ClassOutput(SequenceClassifierOutputWithPast):
    """Class scores and, where labels were given, the loss."""

    routings: Routings | None = None
