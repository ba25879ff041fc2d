"""Schedules over the training, each a class with its own config, and the learning rate."""

import math
from dataclasses import dataclass
from typing import Any

from braidlm.model.config.ranges import Probability, Share
from braidlm.model.config.registry import Choice, NoOptions, Registry
from braidlm.training.amounts import Progress

schedules = Registry("schedule")


@dataclass
class Decay:
    """Options of schedules that decay."""

    final: Share = 0.1
    """The rate at the end, as a share of the maximum."""


class Schedule:
    """The contract: called with progress in [0, 1] after warm-up, returns the share of the maximum rate."""

    Config: Any = Decay

    def __init__(self, config: Any):
        self.config = config

    def __call__(self, progress: float) -> float:
        raise NotImplementedError("abstract: each schedule has its own curve")


@schedules.register("cosine")
class Cosine(Schedule):
    """Half a cosine wave from 1 down to `final`."""

    def __call__(self, progress: float) -> float:
        final = self.config.final
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


@schedules.register("linear")
class Linear(Schedule):
    """A straight line from 1 down to `final`."""

    def __call__(self, progress: float) -> float:
        return 1 - (1 - self.config.final) * min(progress, 1.0)


@schedules.register("constant")
class Constant(Schedule):
    """The full rate throughout."""

    Config = NoOptions

    def __call__(self, progress: float) -> float:
        return 1.0


def constant() -> Choice:
    """The default of what may have a schedule."""
    return Choice("constant", NoOptions())


@schedules.register("wsd")
class WarmupStableDecay(Schedule):
    """Stable, then a straight line down to `final` over the last part."""

    @dataclass
    class Config(Decay):
        final: Share = 0.0
        """The rate at the end, as a share of the maximum."""
        decay: Probability = 0.2
        """The share of the training that the decay takes."""

    def __call__(self, progress: float) -> float:
        into = max(0.0, progress - (1 - self.config.decay)) / self.config.decay
        return 1 - (1 - self.config.final) * min(into, 1.0)


class LearningRate:
    """The learning rate of a step: a warm-up, then a schedule over the rest of the budget.

    Called with the progress before and after the step.
    """

    def __init__(self, config: Any):
        self.max_rate, self.warmup, self.budget = config.optimizer.options.lr, config.warmup, config.budget
        self.schedule = schedules.build(config.schedule)

    def __call__(self, before: Progress, after: Progress) -> float:
        unit, length = self.warmup.unit, self.warmup.count
        # The share of the warm-up that is done after the step, so that the first step has a rate above zero.
        risen = min(after.done(unit) / length, 1.0) if length else 1.0
        share, warmed, progress = before.share(self.budget), before.done(unit), 0.0
        if warmed > length:  # from the end of the warm-up to that of the budget, which may be counted in another unit
            end_of_warmup = share * length / warmed
            progress = (share - end_of_warmup) / (1 - end_of_warmup)
        return self.max_rate * risen * self.schedule(progress)
