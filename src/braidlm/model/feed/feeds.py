"""Feed-forward parts, which transform each token on its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Size
from ..config.registry import Registry
from ..dropout import Dropout
from ..routing.dispatch import Groups
from ..routing.router import ExpertsConfig
from ..routing.routing import Routings
from ..routing.stacked import apply_linear, expand_vector, linear, vector, with_trained_rows

feeds = Registry("feed-forward", third_party=True)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gated_hidden(width: int) -> int:
    """Two thirds of 4 x width, rounded up to a multiple of 64: a gated part then costs as much as a plain one."""
    return (8 * width // 3 + 63) // 64 * 64


@dataclass
class FeedExpertsConfig(ExpertsConfig):
    """A bank of feed-forward parts."""

    shared: Size | None = None
    """Inner size of a shared expert, which every token uses beside those chosen; by default there is none."""


@dataclass
class FeedConfig:
    """The options of every feed-forward part."""

    hidden: Size | None = None
    """Inner size."""
    experts: FeedExpertsConfig | None = None
    """The number of experts of this shape, or their names and router; by default one without a router."""


@feeds.register("mlp")
class MLP(nn.Module):
    """Two matrices with an activation between (GPT-2)."""

    stackable = True

    @dataclass
    class Config(FeedConfig):
        hidden: Size | None = None
        """Inner size; by default 4 x width."""
        activation: Literal["gelu", "gelu_new", "relu"] = "gelu"
        """gelu_new is the tanh approximation that GPT-2 uses."""
        bias: bool = False
        """Whether both matrices have biases."""

    def __init__(self, config: Config, width: int, stack: int | None = None):
        super().__init__()
        hidden = config.hidden or 4 * width
        self.up = linear(stack, width, hidden, config.bias)
        self.out = linear(stack, hidden, width, config.bias)
        self.drop = Dropout(kind="feed")
        self.config, self.activation = config, ACTIVATIONS[config.activation]

    def forward(self, hidden: Tensor, groups: Groups | None = None) -> tuple[Tensor, Routings]:
        return apply_linear(self.out, self.drop(self.activation(apply_linear(self.up, hidden, groups))), groups), ()


class GatedFeed(nn.Module):
    """The base class of units whose values are gated; one product computes gates and values."""

    stackable = True

    @dataclass
    class Config(FeedConfig):
        hidden: Size | None = None
        """Inner size; by default 8/3 x width, rounded up to a multiple of 64."""
        bias: bool = False
        """Whether the matrices have biases."""

    def __init__(self, config: Config, width: int, stack: int | None = None):
        super().__init__()
        self.config, self.stack, self.hidden = config, stack, config.hidden or gated_hidden(width)
        self.gate_up = linear(stack, width, 2 * self.hidden, config.bias)
        self.out = linear(stack, self.hidden, width, config.bias)
        self.drop = Dropout(kind="feed")

    def forward(self, hidden: Tensor, groups: Groups | None = None) -> tuple[Tensor, Routings]:
        inner = self.activate(apply_linear(self.gate_up, hidden, groups), groups)
        return apply_linear(self.out, self.drop(inner), groups), ()

    def activate(self, gate_up: Tensor, groups: Groups | None) -> Tensor:
        """The gated values of gates and values side by side."""
        raise NotImplementedError("each kind of unit gates differently")


@feeds.register("swiglu")
class SwiGLU(GatedFeed):
    """Swish-gated unit (Llama)."""

    trained_rows: slice | None = None
    """The members of a stack whose beta training changes, where others are frozen."""

    @dataclass
    class Config(GatedFeed.Config):
        learned_beta: bool = False
        """Whether Swish has a learned beta per channel, as in PaPaformer."""

    def __init__(self, config: Config, width: int, stack: int | None = None):
        super().__init__(config, width, stack)
        self.beta = vector(stack, self.hidden) if config.learned_beta else None

    def activate(self, gate_up: Tensor, groups: Groups | None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.beta is None:
            return F.silu(gate) * up
        beta = expand_vector(with_trained_rows(self.beta, self.trained_rows), gate, groups)
        return gate * torch.sigmoid(beta * gate) * up


@feeds.register("geglu")
class GEGLU(GatedFeed):
    """GELU-gated unit."""

    def activate(self, gate_up: Tensor, groups: Groups | None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate) * up
