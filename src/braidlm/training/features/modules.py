"""What changes in a model's modules over a training: dropout, temperature, inserted modules that open, and balance."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from braidlm.data.loading.batches import Batch
from braidlm.model.config.ranges import Count, Share
from braidlm.model.config.registry import Choice, Registry
from braidlm.model.config.strict import PartOf
from braidlm.model.dropout import Dropout, scale_dropout
from braidlm.model.paths.joins import GumbelJoin, scale_temperature
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.schedules import Constant, Schedule, constant, schedules
from braidlm.training.step.objective import routers
from braidlm.training.step.parallel import sum_over_processes

dropout_schedules = Registry("dropout schedule")
LEVELS = 20  # the number of levels of a temperature schedule; each change recompiles or recaptures the step


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


@feature("training.temperature")
class Temperature(Feature):
    """The temperature of Gumbel joins over the training."""

    for_decoders = False

    @dataclass
    class Keys:
        temperature: Annotated[Choice, PartOf(schedules, "constant")] = field(default_factory=constant)
        """The temperature of Gumbel joins over the training, as a share of the configured one, in twenty even steps."""

    def __init__(self, setup: Setup):
        self.model, self.schedule = setup.model, schedules.build(setup.training.temperature)
        self.has_effect = any(isinstance(part, GumbelJoin) and part.is_noisy for part in self.model.modules())
        self.scale = 1.0

    def warnings(self) -> Iterable[str]:
        if not self.has_effect:
            yield "training.temperature has no effect: no join of the model chooses by Gumbel noise"

    def begin_step(self, step: int, share: float) -> bool:
        scale = self.schedule(int(share * LEVELS) / LEVELS)
        if scale == self.scale:
            return False
        self.scale = scale
        scale_temperature(self.model, scale)
        return self.has_effect


@feature("training.opening")
class Opening(Feature):
    """Modules that were inserted come into use, by a factor of their probability in a tensor of the router."""

    @dataclass
    class Keys:
        opening: Share = 0.1
        """The share of the training over which modules that were inserted (`braid edit insert`) come into use: a factor
        on their probability goes from 0 to 1. 0: they are used from the first step on."""

    def __init__(self, setup: Setup):
        self.routers = [router for router in routers(setup.model) if router.opening is not None]
        self.duration: float = setup.training.opening

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        return [made] if (made := cls(setup)).routers else []

    def read_batch(self, batch: Batch, share: float = 0.0) -> Batch:
        """Open by the share at the end of the step, so that modules are open a little in the first."""
        for router in self.routers:
            router.open(min(share / self.duration, 1.0) if self.duration else 1.0)
        return batch


@feature("model.balance_rate")
class Balance(Feature):
    """Routers that are balanced without a loss see what the tokens of all processes chose."""

    def __init__(self, setup: Setup):
        self.rank = setup.rank
        # A router that is frozen, or all but its new rows, keeps its ranking.
        balanced = (router for router in routers(setup.model) if router.balance is not None)
        trained = (one for one in balanced if one.scores.weight.requires_grad and one.scores.trained_rows is None)
        self.routers = {router.address: router for router in trained}
        self.picked: list[dict[str, Tensor]] = []  # how often each choice was picked in each micro-batch

    @classmethod
    def make(cls, setup: Setup) -> Sequence[Feature]:
        return [made] if (made := cls(setup)).routers else []

    def read_pass(self, found: Any) -> None:
        self.picked.append(found.picks)

    def end_update(self) -> None:
        for name, router in self.routers.items():
            load = functools.reduce(torch.add, (picks[name] for picks in self.picked))
            router.rebalance(sum_over_processes(load, self.rank))
        self.picked = []


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
        level = _level(progress, self.config.levels)
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
        return 2.0 ** _level(progress, self.config.levels) - 1


def _level(progress: float, levels: int) -> float:
    """The progress in even steps from 0 to 1."""
    return min(int(progress * (levels + 1)), levels) / levels
