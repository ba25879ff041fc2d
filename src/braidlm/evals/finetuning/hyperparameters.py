"""Hyperparameters of fine-tuning: those of the papers, with the user's settings in their place.

All parameters are trained as in the BabyLM pipeline of 2025 (`eval_finetuning.sh`), whose values the MoEP paper uses.
Adapters (LoRA) are trained with the values of the PaPaformer paper (its Table 5), which come from the pipeline of 2024:
the learning rate for all parameters, 3e-5, would hardly change adapters.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from braidlm.evals.evaluated_model import Settings

SEEDS = (42, 12, 3, 100, 200)
"""The first is the BabyLM pipeline's, all five are the PaPaformer paper's; more follow the last."""


@dataclass(frozen=True)
class Hyperparameters:
    """All hyperparameters of fine-tuning but the seed; the defaults are those for all parameters."""

    method: Literal["full", "lora"] = "full"
    learning_rate: float = 3e-5
    batch_size: int = 32
    epochs: int = 10
    length: int = 512
    """The maximum tokens of an example."""
    patience: int | None = None
    """Epochs without a better score after which training ends; None for never."""
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup: float = 0.06
    """The fraction of all steps in which the learning rate rises."""
    final: float = 0.1
    """The fraction of the learning rate at the end."""
    weight_decay: float = 0.01
    rank: int = 8
    alpha: int = 16
    adapter_dropout: float = 0.1

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup_steps = int(self.warmup * steps)
        if step < warmup_steps:
            return self.learning_rate * step / max(1, warmup_steps)
        done = (step - warmup_steps) / max(1, steps - warmup_steps)
        decay = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final + (1 - self.final) * decay)


FULL = Hyperparameters()
FULL_FOR = {
    "boolq": replace(FULL, batch_size=16),
    "multirc": replace(FULL, batch_size=16),
    "wsc": replace(FULL, epochs=30),
}
"""The pipeline's exceptions."""
LORA = Hyperparameters(
    method="lora",
    learning_rate=1e-3,
    batch_size=64,
    epochs=32,
    length=128,
    patience=5,
    schedule="linear",
    warmup=0.0,
    final=0.0,
    weight_decay=0.1,
)


def hyperparameters_for(data_set: str, settings: Settings) -> Hyperparameters:
    """The paper's values, overridden by the user's settings."""
    defaults = FULL_FOR.get(data_set, FULL) if settings.finetune == "full" else LORA
    names = ("learning_rate", "batch_size", "epochs", "length", "patience")
    overrides = {name: value for name in names if (value := getattr(settings, f"finetune_{name}")) is not None}
    return replace(defaults, **overrides)


def seeds_for(settings: Settings) -> list[int]:
    """As many seeds as the settings say."""
    more = range(SEEDS[-1] + 1, SEEDS[-1] + 1 + max(0, settings.seeds - len(SEEDS)))
    return [*SEEDS, *more][: settings.seeds]
