"""Gumbel joins: a router chooses, for each token, one of the paths or their combination (PaPaformer)."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from ..config.ranges import NonNegative, Positive
from ..errors import BraidError
from ..routing.losses import check_losses
from ..routing.routing import Routing, Routings
from ..routing.stacked import without_residual
from .joins import JoinConfig, JoinShape, SameWidthJoin, joins

COMBINED = "combined"
"""The name of the choice of a linear combination of all paths."""


class GumbelJoin(SameWidthJoin):
    """The weighted sum of the paths and of their combination.

    In training the weights are sampled (Gumbel-softmax, straight-through with `hard`); in evaluation the most probable
    choice has weight 1, so that the output is deterministic.
    """

    @dataclass
    class Config(JoinConfig):
        sample: Literal["gumbel", "softmax"] = "gumbel"
        """gumbel: sampled choices in training; softmax: no noise, every choice is weighted by its probability."""
        hard: bool = True
        """With gumbel: one choice per token forward, straight-through gradients; otherwise soft weights."""
        temperature: Positive = 1.0
        """Sharpness of the weights: lower is sharper. With gumbel, `training.temperature` gives it a schedule."""
        losses: dict[str, NonNegative] = field(default_factory=dict)
        """Routing losses and their weights, e.g. {token_entropy: 0.01, load_balance: 0.01}."""

        def __post_init__(self) -> None:
            check_losses(self.losses)

    def __init__(self, config: Config, shape: JoinShape):
        super().__init__(config, shape)
        if COMBINED in shape.names:
            raise BraidError(f"a path cannot be called '{COMBINED}' here: that is the name of all paths together")
        self.is_noisy = config.sample == "gumbel"
        self.temperature_scale = 1.0
        """A schedule changes it between steps."""
        self.choices = (*shape.names, COMBINED)
        self.combine = without_residual(nn.Linear(sum(shape.widths), shape.width_in))
        self.router = nn.Linear(self.router_inputs(shape), len(self.choices))

    @staticmethod
    def router_inputs(shape: JoinShape) -> int:
        raise NotImplementedError("the routers of v1 and v2 have different inputs")

    def scores(self, concatenated: Tensor, combined: Tensor) -> Tensor:
        raise NotImplementedError("the routers of v1 and v2 have different inputs")

    def join(self, outputs: list[Tensor], stream: Tensor) -> tuple[Tensor, Routings]:
        concatenated = torch.cat(self.active(outputs), dim=-1)
        combined = self.combine(concatenated)
        scores_BTN = self.scores(concatenated, combined).float()
        if self.inactive:
            inactive = torch.tensor([name in self.inactive for name in self.choices], device=scores_BTN.device)
            scores_BTN = scores_BTN.masked_fill(inactive, -torch.inf)
        weights_BTN = self.weigh(scores_BTN)
        outputs = [*self.to_stream_width(outputs), combined]
        joined = sum(w * x for w, x in zip(weights_BTN.to(combined.dtype).split(1, dim=-1), outputs, strict=True))
        all_choices = torch.arange(len(self.choices), device=stream.device).expand_as(scores_BTN)
        routing = Routing(
            self.address,
            self.choices,
            scores_BTN.softmax(-1),
            all_choices,
            weights_BTN,
            dict(self.config.losses),
            scores_BTN,
        )
        return self.to_width_out(joined), (routing,)

    def weigh(self, scores_BTN: Tensor) -> Tensor:
        """The weight of each choice for each token."""
        if not self.is_noisy:  # without the schedule, which would change the output in evaluation
            return (scores_BTN / self.config.temperature).softmax(-1)
        if not self.training:
            return nn.functional.one_hot(scores_BTN.argmax(-1), len(self.choices)).to(scores_BTN.dtype)
        noise = -torch.empty_like(scores_BTN).exponential_().clamp_min(1e-20).log()
        soft = ((scores_BTN + noise) / (self.config.temperature * self.temperature_scale)).softmax(-1)
        if not self.config.hard:
            return soft
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        return hard + (soft - soft.detach())  # the brackets make it exactly 0 or 1


@joins.register("gumbel_v1")
class GumbelV1(GumbelJoin):
    """The router reads the combined representation."""

    @staticmethod
    def router_inputs(shape: JoinShape) -> int:
        return shape.width_in

    def scores(self, concatenated: Tensor, combined: Tensor) -> Tensor:
        return self.router(combined)


@joins.register("gumbel_v2")
class GumbelV2(GumbelJoin):
    """The router reads the concatenated outputs of the paths."""

    @staticmethod
    def router_inputs(shape: JoinShape) -> int:
        return sum(shape.widths)

    def scores(self, concatenated: Tensor, combined: Tensor) -> Tensor:
        return self.router(concatenated)


def scale_temperature(model: nn.Module, scale: float) -> None:
    """Set every Gumbel join of a model to `scale` times its configured temperature."""
    for module in model.modules():
        if isinstance(module, GumbelJoin):
            module.temperature_scale = scale
