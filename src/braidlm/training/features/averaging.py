"""Averages of the weights over steps, which are validated and saved in place of the weights of the last step.

The training itself goes on with its own weights, and a run's state keeps both. Buffers are those of the last step.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from braidlm.model.config.ranges import Count, Probability, Rate
from braidlm.model.config.registry import Choice, Registry
from braidlm.model.config.strict import PartOf
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.step.spread import local, put, whole_view

averages = Registry("average of weights")
STEPS, AVERAGE, OWN = "steps", "average", "own"
"""In a saved state: how many steps the average has seen, and prefixes of its tensors and of the model's own weights."""
ROUNDING = 1e-9


@feature("training.average")
class WeightAverage(Feature):
    """The base class: which steps count, and how much."""

    Config: Any
    file = "average.safetensors"

    @dataclass
    class Keys:
        average: Annotated[Choice, PartOf(averages)] | None = None
        """Validate and save an average of the weights over steps, `{kind: ema, rate: 0.999}` or
        `{kind: last, share: 0.2}`, in place of those of the last step; the training goes on with its own."""

    def __init__(self, config: Any, model: nn.Module):
        self.config = config
        self.every: int = getattr(config, "every", 1)  # steps between the weights that count
        self.model, self.steps = model, 0  # steps since the average began; 0 before
        self.find_parameters()

    def find_parameters(self) -> None:
        self.parameters: Mapping[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.tensors = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters.values()]
        """The averages in the order of the parameters, made at once: without room for them no step is begun."""

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        chosen = setup.training.average
        return [] if chosen is None else [averages.build(chosen, setup.model)]

    def is_open(self, share: float) -> bool:
        """Whether weights count at this progress of the training, in [0, 1]."""
        raise NotImplementedError("abstract: each average has its own steps")

    def weight(self, count: int) -> float:
        """The share of the last weights in an average of so many."""
        return 1 / count

    @property
    def count(self) -> int:
        """The number of weights that are in the average; 0 before it begins."""
        return -(-self.steps // self.every)

    @torch.no_grad()
    def end_step(self, share: float) -> None:
        if not self.is_open(share):
            return
        if self.steps % self.every == 0:
            weights = [local(p.detach()).float() for p in self.parameters.values()]
            torch._foreach_lerp_([local(each) for each in self.tensors], weights, self.weight(self.count + 1))
        self.steps += 1

    @contextlib.contextmanager
    @torch.no_grad()
    def evaluating(self) -> Iterator[None]:
        """The model has the average as its weights, in place: a captured step reads them at the same addresses."""
        if not self.count:
            yield
            return
        parameters = [local(p.detach()) for p in self.parameters.values()]
        own = [p.clone() for p in parameters]
        torch._foreach_copy_(parameters, [local(each) for each in self.tensors])
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, own)

    def facts(self) -> dict[str, int]:
        return {"averaged": self.count} if self.count else {}

    def state(self) -> dict[str, Tensor]:
        """The average, and the model's own weights, since its folder has the average."""
        saved = {STEPS: torch.tensor(self.steps)}
        if self.steps:
            for (name, own), average in zip(self.parameters.items(), self.tensors, strict=True):
                # A copy: what is written meanwhile finds the average in the model's place.
                named = {f"{AVERAGE}.{name}": average, f"{OWN}.{name}": own.detach().clone()}
                saved |= {key: whole_view(tensor, own) for key, tensor in named.items()}
        return saved

    @torch.no_grad()
    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        self.steps = int(saved[STEPS])
        if not self.steps:
            return
        for (name, own), average in zip(self.parameters.items(), self.tensors, strict=True):
            put(whole_view(average, own), saved[f"{AVERAGE}.{name}"])
            put(whole_view(own, own), saved[f"{OWN}.{name}"])


@averages.register("ema")
class ExponentialAverage(WeightAverage):
    """The exponential moving average of the weights over all steps."""

    @dataclass
    class Config:
        rate: Rate = 0.999
        """How much of the average a step leaves; until 1 / (1 - rate) steps it is the plain mean of all."""

    def is_open(self, share: float) -> bool:
        return True

    def weight(self, count: int) -> float:
        return max(1 - self.config.rate, 1 / count)


@averages.register("last")
class LastAverage(WeightAverage):
    """The mean of the weights over the last part of the training."""

    @dataclass
    class Config:
        share: Probability = 0.2
        """The share of the budget over which weights are averaged."""
        every: Count = 1
        """Steps between the weights that are averaged."""

    def is_open(self, share: float) -> bool:
        return share > 1 - self.config.share + ROUNDING

    def budget_grew(self) -> None:
        self.steps = 0  # those so far were the last of the smaller budget
