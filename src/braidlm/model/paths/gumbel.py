"""Gumbel joins: a router chooses, for each token, one of the paths or their combination (PaPaformer)."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import BraidError
from ..routing.losses import check_losses
from ..routing.routing import Routing, Routings
from ..routing.stacked import without_residual
from .joins import JoinConfig, JoinShape, SameWidthJoin, joins

COMBINED = "combined"
"""The name of the choice that is no single path but a linear combination of all."""


class GumbelJoin(SameWidthJoin):
    """The paths and their combination, weighted by a router's choice.

    In training the choice is a sample (Gumbel noise, and with `hard` one choice forward, all of them backward); in
    evaluation it is the most probable choice, so that the same text always gives the same answer.
    """

    @dataclass
    class Config(JoinConfig):
        sample: Literal["gumbel", "softmax"] = "gumbel"
        """gumbel: choices by chance in training; softmax: no noise, every choice counts by its probability."""
        hard: bool = True
        """With gumbel: one choice per token forward, straight-through gradients; else soft weights."""
        temperature: float = 1.0
        """Sharpness of the weights: lower is sharper. With gumbel, `training.temperature` gives it a schedule."""
        losses: dict[str, float] = field(default_factory=dict)
        """Routing losses and their weights, e.g. {token_entropy: 0.01, load_balance: 0.01}."""

        def __post_init__(self) -> None:
            if self.temperature <= 0:
                raise BraidError(f"temperature must be above 0, got {self.temperature:g}")
            check_losses(self.losses)

    def __init__(self, config: Config, shape: JoinShape):
        super().__init__(config, shape)
        if COMBINED in shape.names:
            raise BraidError(f"a path cannot be called '{COMBINED}' here: that is the choice of all paths together")
        self.is_noisy = config.sample == "gumbel"
        self.temperature_scale = 1.0
        """What a schedule changes between steps."""
        self.choices = (*shape.names, COMBINED)
        self.combine = without_residual(nn.Linear(sum(shape.widths), shape.width_in))
        self.router = nn.Linear(self.router_inputs(shape), len(self.choices))

    @staticmethod
    def router_inputs(shape: JoinShape) -> int:
        raise NotImplementedError("abstract: v1 and v2 read different things")

    def scores(self, side_by_side: Tensor, combined: Tensor) -> Tensor:
        raise NotImplementedError("abstract: v1 and v2 read different things")

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        side_by_side = torch.cat(self.active(outputs), dim=-1)
        combined = self.combine(side_by_side)
        scores_BTN = self.scores(side_by_side, combined).float()
        if self.inactive:
            inactive = torch.tensor([name in self.inactive for name in self.choices], device=scores_BTN.device)
            scores_BTN = scores_BTN.masked_fill(inactive, -torch.inf)
        weights_BTN = self.weigh(scores_BTN)
        level = [*self.to_stream_width(outputs), combined]
        joined = sum(w * x for w, x in zip(weights_BTN.to(combined.dtype).split(1, dim=-1), level, strict=True))
        everything = torch.arange(len(self.choices), device=stream.device).expand_as(scores_BTN)
        record = Routing(
            self.address,
            self.choices,
            scores_BTN.softmax(-1),
            everything,
            weights_BTN,
            dict(self.config.losses),
            scores_BTN,
        )
        return self.to_width_out(joined), (record,)

    def weigh(self, scores_BTN: Tensor) -> Tensor:
        """What each choice counts for each token."""
        if not self.is_noisy:  # no schedule: it would change what the finished model computes
            return (scores_BTN / self.config.temperature).softmax(-1)
        if not self.training:
            return nn.functional.one_hot(scores_BTN.argmax(-1), len(self.choices)).to(scores_BTN.dtype)
        noise = -torch.empty_like(scores_BTN).exponential_().clamp_min(1e-20).log()
        soft = ((scores_BTN + noise) / (self.config.temperature * self.temperature_scale)).softmax(-1)
        if not self.config.hard:
            return soft
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        return hard + (soft - soft.detach())  # so bracketed it is 0 or 1 exactly


@joins.register("gumbel_v1")
class GumbelV1(GumbelJoin):
    """The router reads the combined representation."""

    @staticmethod
    def router_inputs(shape: JoinShape) -> int:
        return shape.width_in

    def scores(self, side_by_side: Tensor, combined: Tensor) -> Tensor:
        return self.router(combined)


@joins.register("gumbel_v2")
class GumbelV2(GumbelJoin):
    """The router reads the paths' outputs side by side."""

    @staticmethod
    def router_inputs(shape: JoinShape) -> int:
        return sum(shape.widths)

    def scores(self, side_by_side: Tensor, combined: Tensor) -> Tensor:
        return self.router(side_by_side)


def scale_temperature(model: nn.Module, scale: float) -> None:
    """Set every Gumbel join of a model to `scale` times its configured temperature."""
    for module in model.modules():
        if isinstance(module, GumbelJoin):
            module.temperature_scale = scale
