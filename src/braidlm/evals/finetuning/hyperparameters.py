"""How models are fine-tuned: the numbers that the papers used, and what a user wants otherwise.

All parameters are trained as the BabyLM pipeline of 2025 does it (`eval_finetuning.sh`), whose numbers the MoEP paper
took over. Adapters (LoRA) are trained with the numbers of the PaPaformer paper (its Table 5), which come from the
pipeline of 2024: three parts in a hundred thousand, the rate for all parameters, would leave adapters as they are.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from braidlm.core.errors import BraidError
from braidlm.evals.scoring.contestant import Settings

SEEDS = (42, 12, 3, 100, 200)
"""The first is the BabyLM pipeline's, all five are the PaPaformer paper's; more follow the last."""


@dataclass(frozen=True)
class Hyperparameters:
    """Everything that decides how one model is fine-tuned, but the seed."""

    method: Literal["full", "lora"]
    learning_rate: float
    batch_size: int
    epochs: int
    length: int
    """The most tokens of an example."""
    patience: int | None
    """Epochs without a better score after which training ends; None for never."""
    schedule: Literal["cosine", "linear"]
    warmup: float
    """The share of all steps in which the learning rate rises."""
    final: float
    """Which part of the learning rate is left at the end."""
    weight_decay: float
    rank: int = 8
    alpha: int = 16
    adapter_dropout: float = 0.1

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = int(self.warmup * steps)
        if step < rising:
            return self.learning_rate * step / max(1, rising)
        done = (step - rising) / max(1, steps - rising)
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final + (1 - self.final) * left)


FULL = Hyperparameters(
    method="full",
    learning_rate=3e-5,
    batch_size=32,
    epochs=10,
    length=512,
    patience=None,
    schedule="cosine",
    warmup=0.06,
    final=0.1,
    weight_decay=0.01,
)
FULL_FOR: dict[str, dict[str, Any]] = {
    "boolq": {"batch_size": 16},
    "multirc": {"batch_size": 16},
    "wsc": {"epochs": 30},
}
"""Where the pipeline has other numbers."""
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


def chosen(data_set: str, settings: Settings) -> Hyperparameters:
    """The paper's numbers with those that the user gave in their place."""
    _check(settings)
    if settings.finetune == "full":
        found = dataclasses.replace(FULL, **FULL_FOR.get(data_set, {}))
    else:
        found = LORA
    names = ("learning_rate", "batch_size", "epochs", "length", "patience")
    given = {name: value for name in names if (value := getattr(settings, f"finetune_{name}")) is not None}
    return dataclasses.replace(found, **given)


def seeds_of(settings: Settings) -> list[int]:
    """As many seeds as are asked for."""
    more = range(SEEDS[-1] + 1, SEEDS[-1] + 1 + max(0, settings.seeds - len(SEEDS)))
    return [*SEEDS, *more][: settings.seeds]


def _check(settings: Settings) -> None:
    if settings.finetune not in ("full", "lora"):
        raise BraidError(f"models are fine-tuned in full or with lora, not with '{settings.finetune}'")
    least = {"seeds": 1, "finetune_batch_size": 1, "finetune_epochs": 1, "finetune_length": 8, "finetune_patience": 1}
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and value < low:
            raise BraidError(f"{name} is {value}, and must be at least {low}")
    rate = settings.finetune_learning_rate
    if rate is not None and not 0 < rate < 1:
        raise BraidError(f"finetune_learning_rate is {rate}, and must lie between 0 and 1")
