"""The model's dropout rates over the training."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from braidlm.model.config.ranges import Count, Share
from braidlm.model.config.registry import Choice, Registry
from braidlm.model.config.strict import PartOf
from braidlm.model.dropout import Dropout, scale_dropout
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.schedules import Constant, Schedule, constant

dropout_schedules = Registry("dropout schedule")


@feature("training.dropout")
class DropoutRates(Feature):
    """A factor of every dropout rate."""

    for_decoders = False

    @dataclass
    class Keys:
        dropout: Annotated[Choice, PartOf(dropout_schedules, "constant")] = field(default_factory=constant)
        """The model's dropout rates over the training."""

    def __init__(self, setup: Setup):
        self.model, self.schedule = setup.model, dropout_schedules.build(setup.training.dropout)
        dropouts = [part for part in self.model.modules() if isinstance(part, Dropout) and part.rate > 0]
        self.has_effect, self.is_recorded = bool(dropouts), any(part.is_recorded for part in dropouts)
        self.scale = 1.0
        scale_dropout(self.model, self.scale)

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        return [cls(setup)]

    def warnings(self) -> Iterable[str]:
        if not self.has_effect and not isinstance(self.schedule, Constant):
            yield "training.dropout has no effect: every dropout rate of the model is 0"

    def begin_step(self, step: int, share: float) -> bool:
        scale = self.schedule(share)
        if scale == self.scale:
            return False
        self.scale = scale
        scale_dropout(self.model, scale)
        return self.is_recorded


@dropout_schedules.register("constant")
class ConstantDropout(Constant):
    """The configured rates throughout."""


@dropout_schedules.register("early")
class EarlyDropout(Schedule):
    """The configured rates at first, none after `at`."""

    @dataclass
    class Config:
        at: Share = 0.5
        """The progress at which dropout changes."""

    def __call__(self, progress: float) -> float:
        return 1.0 if progress < self.config.at else 0.0


@dropout_schedules.register("late")
class LateDropout(EarlyDropout):
    """None at first, the configured rates after `at`."""

    def __call__(self, progress: float) -> float:
        return 1.0 - super().__call__(progress)


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
