"""Routers: for each token the top k of N named things, with the record of the choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn

from .errors import BraidError
from .norms import norms
from .registry import Choice
from .routing import Routing
from .routing_losses import check_losses
from .strict import PartOf


@dataclass
class RouterConfig:
    """How a router chooses."""

    top_k: int = 2
    """How many things serve each token."""
    renormalise: bool = True
    """Whether the chosen things' weights are made to add up to 1 (MoEP), or stay as the softmax gave them."""
    norm: Annotated[Choice, PartOf(norms)] | None = None
    """A normalisation of what the router reads; by default it reads the stream as it is."""
    bias: bool = True
    """Whether the scores have a bias."""
    noise: float = 0.0
    """Standard deviation of noise on the scores in training."""
    losses: dict[str, float] = field(default_factory=lambda: {"switch": 0.01})
    """Routing losses and their weights."""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise BraidError(f"top_k must be at least 1, got {self.top_k}")
        if self.noise < 0:
            raise BraidError(f"noise must be 0 or more, got {self.noise:g}")
        check_losses(self.losses)


class TopKRouter(nn.Module):
    """Linear scores, softmax over all, then the top k."""

    def __init__(self, config: RouterConfig, width: int, choices: Sequence[str]):
        super().__init__()
        if config.top_k > len(choices):
            raise BraidError(f"top_k is {config.top_k}, and there are only {len(choices)} to choose from")
        self.config, self.choices = config, tuple(choices)
        self.address = ""
        """The model's name for this router; the model sets it."""
        self.norm = norms.build(config.norm, width) if config.norm is not None else None
        self.scores = nn.Linear(width, len(self.choices), bias=config.bias)

    def forward(self, hidden: Tensor) -> Routing:
        read = hidden if self.norm is None else self.norm(hidden)
        scores_BTN = self.scores(read).float() if read.dtype != torch.float64 else self.scores(read)
        if self.training and self.config.noise:
            scores_BTN = scores_BTN + torch.randn_like(scores_BTN) * self.config.noise
        probabilities_BTN = scores_BTN.softmax(-1)
        weights_BTK, chosen_BTK = probabilities_BTN.topk(self.config.top_k, dim=-1)
        if self.config.renormalise:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        losses = dict(self.config.losses)
        return Routing(self.address, self.choices, probabilities_BTN, chosen_BTK, weights_BTK, losses, scores_BTN)
