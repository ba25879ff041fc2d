"""Schedules of the learning rate and of dropout; each is a class with its own config."""

import math
from dataclasses import dataclass
from typing import Any

from braidlm.model.config.ranges import Count, Probability, Share
from braidlm.model.config.registry import Registry

schedules = Registry("schedule")
dropout_schedules = Registry("dropout schedule")


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


@dataclass
class NoOptions:
    """A schedule without options."""


@schedules.register("constant")
class Constant(Schedule):
    """The same rate throughout."""

    Config = NoOptions

    def __call__(self, progress: float) -> float:
        return 1.0


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


@dataclass
class Switch:
    """Options of dropout schedules that switch once."""

    at: Share = 0.5
    """The progress at which dropout changes."""


@dropout_schedules.register("constant")
class ConstantDropout(Constant):
    """The configured rates throughout."""


@dropout_schedules.register("early")
class EarlyDropout(Schedule):
    """The configured rates at first, none after `at`."""

    Config = Switch

    def __call__(self, progress: float) -> float:
        return 1.0 if progress < self.config.at else 0.0


@dropout_schedules.register("late")
class LateDropout(Schedule):
    """None at first, the configured rates after `at`."""

    Config = Switch

    def __call__(self, progress: float) -> float:
        return 0.0 if progress < self.config.at else 1.0


@dropout_schedules.register("linear")
class LinearDropout(Schedule):
    """From none to the configured rates in `levels` even steps (each one rebuilds a compiled or captured step)."""

    @dataclass
    class Config:
        levels: Count = 10
        """How many steps the line is made of."""
        falling: bool = False
        """From the configured rates down to none instead."""

    def __call__(self, progress: float) -> float:
        level = min(int(progress * (self.config.levels + 1)), self.config.levels) / self.config.levels
        return 1 - level if self.config.falling else level


@dropout_schedules.register("triangle")
class TriangleDropout(Schedule):
    """From none up to the configured rates and down again, in `levels` even steps each way."""

    @dataclass
    class Config:
        cycles: Count = 1
        """How often it rises and falls."""
        levels: Count = 5
        """How many steps each side is made of (each one rebuilds a compiled or captured step)."""

    def __call__(self, progress: float) -> float:
        within = min(progress, 1.0) * self.config.cycles % 1.0
        height = 1 - abs(2 * within - 1)
        return math.floor(height * self.config.levels + 0.5) / self.config.levels


@dropout_schedules.register("exponential")
class ExponentialDropout(Schedule):
    """From none to the configured rates as 2^progress - 1, slowly at first (LayerSkip), in `levels` even steps."""

    @dataclass
    class Config:
        levels: Count = 10
        """How many steps the curve is made of."""

    def __call__(self, progress: float) -> float:
        levels: int = self.config.levels
        return 2.0 ** (min(int(progress * (levels + 1)), levels) / levels) - 1
