"""Feed-forward parts, which transform each token on its own, and banks of them as experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Size
from ..config.registry import Choice, Registry
from ..dropout import Dropout
from ..routing.dispatch import Groups, Permutation, is_sparse, sort_by_expert
from ..routing.router import (
    ExpertsConfig,
    RoutedExperts,
    RouterStack,
    TopKRouter,
    check_stackable,
    set_active_share,
)
from ..routing.routing import Routings
from ..routing.stacked import apply_linear, expand_vector, linear, stack_kwargs, vector, with_trained_rows

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


@feeds.register("geglu")
class GEGLU(GatedFeed):
    """GELU-gated unit."""

    def activate(self, gate_up: Tensor, groups: Groups | None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate) * up


@feeds.register("swiglu")
class SwiGLU(GatedFeed):
    """Swish-gated unit (Llama)."""

    trained_rows: slice | None = None  # the members of a stack whose beta training changes, where others are frozen

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


def feed_part(choice: Choice, width: int, stack: int | None, members: Sequence[str] = ()) -> nn.Module:
    """A feed-forward part, or a bank of them with its router; or a stack of either, for these members."""
    experts = getattr(choice.options, "experts", None)
    if experts is None:
        return feeds.build(choice, width, **stack_kwargs(stack))  # type: ignore[no-any-return]
    check_stackable(feeds, choice)
    if stack is None:
        return RoutedFeed(choice, experts, width, TopKRouter(experts.router, width, experts.expert_names))
    router = RouterStack(experts.router, width, experts.expert_names, members)
    return RoutedFeedStack(choice, experts, width, router, stack)


class RoutedFeed(RoutedExperts, nn.Module):
    """The weighted sum of the experts chosen for each token, plus the shared expert if there is one.

    Experts and router read the normalised stream; the block adds the sum to the stream.
    """

    def __init__(
        self, choice: Choice, config: FeedExpertsConfig, width: int, router: nn.Module, stack: int | None = None
    ):
        super().__init__()
        self.config, self.compute, self.experts = choice.options, config.router.compute, len(config.expert_names)
        self.router: Any = router
        self.bank = feeds.build(choice, width, stack=(stack or 1) * self.experts)
        self.drop_output = Dropout(kind="expert_outputs")
        set_active_share(self.bank, config.active_share)
        self.shared: nn.Module | None = None
        if config.shared is not None:
            shared = Choice(choice.kind, replace(choice.options, hidden=config.shared))
            self.shared = feeds.build(shared, width, **stack_kwargs(stack))

    def forward(self, normed: Tensor) -> tuple[Tensor, Routings]:
        routing = self.router(normed)
        output = self.mixed(normed, routing)
        output = output if self.shared is None else output + self.shared(normed)[0]
        return output, routing if isinstance(routing, tuple) else (routing,)

    def expert_rows(self, normed: Tensor, permutation: Permutation, *others: Any) -> Tensor:
        return self.bank(permutation.gather(normed.flatten(0, -2)), permutation.groups)[0]  # type: ignore[no-any-return]

    def expert_outputs(self, normed: Tensor, *others: Any) -> Tensor:
        return self.bank(normed[None])[0]  # type: ignore[no-any-return]


class RoutedFeedStack(RoutedFeed):
    """`RoutedFeed` for several members, [member, batch, time, width] in and out.

    Expert e of member m is row m x experts + e of the bank, so that one dispatch serves the tokens of all members.
    """

    def mixed(self, normed: Tensor, routings: Any, may_be_sparse: bool = True, *others: Any) -> Tensor:
        if is_sparse(self.compute, normed):
            chosen = [r.chosen_BTK.flatten(0, 1) + member * self.experts for member, r in enumerate(routings)]
            permutation = sort_by_expert(torch.cat(chosen), len(routings) * self.experts)
            rows = self.drop_output(self.expert_rows(normed, permutation))
            return permutation.combine(rows, torch.cat([r.weights_BTK.flatten(0, 1) for r in routings])).view_as(normed)
        outputs, _ = self.bank(normed.repeat_interleave(self.experts, dim=0))
        outputs_MEBTW = self.drop_output(outputs).unflatten(0, (-1, self.experts))
        weights_MBTE = torch.stack([r.weights_BTN for r in routings]).to(outputs.dtype)
        return torch.einsum("mebtw,mbte->mbtw", outputs_MEBTW, weights_MBTE)
