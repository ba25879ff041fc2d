"""What changes in routers and joins over a training: temperature, inserted modules that open, and balance."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from braidlm.data.loading.batches import Batch
from braidlm.model.config.ranges import Share
from braidlm.model.config.registry import Choice
from braidlm.model.config.strict import PartOf
from braidlm.model.paths.joins import GumbelJoin, scale_temperature
from braidlm.model.routing.router import TopKRouter
from braidlm.training.features.feature import Feature, Setup, feature
from braidlm.training.schedules import constant, schedules
from braidlm.training.step.objective import routers
from braidlm.training.step.parallel import sum_over_processes

LEVELS = 20
"""The number of levels of a temperature schedule; each change recompiles or recaptures the step."""


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
        self.routers = {router.address: router for router in routers(setup.model) if _is_balanced(router)}
        self.picked: list[dict[str, Tensor]] = []
        """How often each choice was picked in each micro-batch."""

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


def _is_balanced(router: TopKRouter) -> bool:
    """Whether training adjusts the router's ranking; one that is frozen, or all but its new rows, keeps it."""
    trained = router.scores.weight.requires_grad and router.scores.trained_rows is None
    return router.balance is not None and trained
