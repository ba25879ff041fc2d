"""Heads of models side by side: each path has logits of its own, and what is averaged is their probabilities.

The logits that these heads return are the logarithms of the averaged probabilities, so that their softmax is the
average itself, and whoever samples, scores or distils needs to know nothing of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..heads.head import heads
from ..heads.linear import LinearHead
from ..heads.losses import IGNORED, next_token_loss
from .per_path_norm import PathPart, widths_of


@heads.register("average")
class AverageHead(LinearHead):
    """Every path predicts the next token by itself, from its own part of the stream; the probabilities are averaged."""

    composed = {}  # a model with this head is made of whole models, and is no path of another
    weighs_tokens = False
    """Whether the shares of the paths are others from token to token."""

    @dataclass(kw_only=True)
    class Config(LinearHead.Config):
        paths: list[PathPart]
        """The paths in the order of their parts of the stream: {name, width}."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        if config.bias:
            self.bias = nn.Parameter(torch.empty(len(config.paths), vocab_size))
        self.names, self.widths = tuple(path.name for path in config.paths), widths_of(config.paths, width)
        self.active = list(range(len(self.names)))
        """The indices of the paths that are averaged."""

    def use_paths(self, active: frozenset[str]) -> None:
        """An inactive path has no share of the average."""
        self.active = [index for index, name in enumerate(self.names) if name in active]

    def of_active(self, values: Tensor) -> Tensor:
        """Of values [..., path] those of the active paths."""
        # Not by a list of indices: a GPU would have to copy it, which no graph can hold.
        return torch.stack([values[..., index] for index in self.active], dim=-1)

    def path_routers(self) -> tuple[()]:
        """No router chooses among the paths."""
        return ()

    def forward(self, hidden: Tensor, evidence: Tensor | None = None) -> Tensor:
        """The logarithms of the averaged probabilities [..., vocabulary]."""
        weights = self.log_weights(hidden, evidence).unbind(-1)
        pairs = zip(self.path_logits(hidden), weights, strict=True)
        return reduce(torch.logaddexp, (logits.log_softmax(-1) + weight[..., None] for logits, weight in pairs))

    def log_weights(self, hidden: Tensor, evidence: Tensor | None = None) -> Tensor:
        """The logarithm of each active path's share of the average, [path] or [..., path]."""
        return torch.zeros(len(self.active), dtype=_wide(hidden), device=hidden.device).log_softmax(-1)

    def path_logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """The logits [..., vocabulary] of each active path."""
        parts, matrices = hidden.split(self.widths, dim=-1), self.weight.split(self.widths, dim=1)
        for index in self.active:
            bias = None if self.bias is None else self.bias[index]
            yield F.linear(parts[index], matrices[index], bias).to(_wide(hidden))

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        count: Tensor | float | None = None,
        logits: Tensor | None = None,
        evidence: Tensor | None = None,
    ) -> Tensor:
        """The same in less memory: in training only what each path gives to the targets is averaged."""
        if logits is not None or not torch.is_grad_enabled():
            return next_token_loss(self(hidden, evidence) if logits is None else logits, targets, count)
        flat, real = targets.flatten(), targets != IGNORED
        of_paths = [
            -F.cross_entropy(one.flatten(0, -2), flat, ignore_index=IGNORED, reduction="none").view_as(targets)
            for one in self.path_logits(hidden)
        ]
        averaged = (torch.stack(of_paths, dim=-1) + self.log_weights(hidden, evidence)).logsumexp(-1)
        return -torch.where(real, averaged, 0.0).sum() / (real.sum() if count is None else count)

    def paths_and_joins(self) -> tuple[list[Any], list[nn.Module]]:
        return [self], []


@heads.register("mixture")
class MixtureHead(AverageHead):
    """The same with learned shares: one number for each path, or with `per_token` a router that reads the stream."""

    @dataclass(kw_only=True)
    class Config(AverageHead.Config):
        per_token: bool = False
        """Whether a linear router reads the stream and changes the shares from token to token."""

    def __init__(self, config: Config, width: int, vocab_size: int):
        super().__init__(config, width, vocab_size)
        self.mixture = MixtureWeights(width if config.per_token else None, len(config.paths))
        self.weighs_tokens = config.per_token

    def log_weights(self, hidden: Tensor, evidence: Tensor | None = None) -> Tensor:
        return self.of_active(self.mixture(hidden)).to(_wide(hidden)).log_softmax(-1)

    def paths_and_joins(self) -> tuple[list[Any], list[nn.Module]]:
        return [parameter for parameter in (self.weight, self.bias) if parameter is not None], [self.mixture]


class MixtureWeights(nn.Module):
    """The logits of the paths' shares; they begin equal."""

    def __init__(self, width: int | None, paths: int):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(paths))
        self.router = None if width is None else ZeroLinear(width, paths, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.bias if self.router is None else self.router(hidden) + self.bias


class ZeroLinear(nn.Linear):
    """A linear layer that begins at zero."""

    @staticmethod
    def fill(module: nn.Module, parameter: nn.Parameter) -> None:
        nn.init.zeros_(parameter)


def _wide(hidden: Tensor) -> torch.dtype:
    """Probabilities are computed in float32, or in float64."""
    return torch.promote_types(hidden.dtype, torch.float32)
