"""Feed-forward experts: a bank of parts of one shape, of which a router chooses a few for each token."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..config.registry import Choice
from ..dropout import Dropout
from ..routing.dispatch import is_sparse, sort_by_expert
from ..routing.router import RouterStack, TopKRouter, check_stackable, set_active_share
from ..routing.routing import Routing, Routings
from ..routing.stacked import stack_kwargs, weighted_sum
from .feeds import FeedExpertsConfig, feeds


def feed_part(choice: Choice, width: int, stack: int | None, members: Sequence[str] = ()) -> nn.Module:
    """A feed-forward part, or a bank of them with its router; or a stack of either, for these members."""
    experts = getattr(choice.options, "experts", None)
    if experts is None:
        return feeds.build(choice, width, **stack_kwargs(stack))  # type: ignore[no-any-return]
    check_stackable(feeds, choice)
    if stack is not None:
        return RoutedFeedStack(choice, experts, width, members)
    return RoutedFeed(choice, experts, width)


class RoutedFeed(nn.Module):
    """The weighted sum of the experts chosen for each token, plus the shared expert if there is one.

    Experts and router read the normalised stream; the block adds the sum to the stream.
    """

    def __init__(self, choice: Choice, config: FeedExpertsConfig, width: int):
        super().__init__()
        self.config, names, self.compute = choice.options, config.expert_names, config.router.compute
        self.router = TopKRouter(config.router, width, names)
        self.bank = feeds.build(choice, width, stack=len(names))
        self.drop = Dropout(kind="expert_outputs")
        set_active_share(self.bank, config.router.top_k / len(names))
        self.shared: nn.Module | None = None
        if config.shared is not None:
            self.shared = feeds.build(Choice(choice.kind, replace(choice.options, hidden=config.shared)), width)

    def forward(self, normed: Tensor) -> tuple[Tensor, Routings]:
        routing = self.router(normed)
        output = (self._sparse if is_sparse(self.compute, normed) else self._dense)(normed, routing)
        return (output if self.shared is None else output + self.shared(normed)[0]), (routing,)

    def _sparse(self, normed: Tensor, routing: Routing) -> Tensor:
        permutation = sort_by_expert(routing.chosen_BTK.flatten(0, 1), len(self.router.choices))
        rows, _ = self.bank(permutation.gather(normed.flatten(0, 1)), permutation.groups)
        return permutation.combine(self.drop(rows), routing.weights_BTK.flatten(0, 1)).view_as(normed)

    def _dense(self, normed: Tensor, routing: Routing) -> Tensor:
        return weighted_sum(self.drop(self.expert_outputs(normed)), routing)

    def expert_outputs(self, normed: Tensor) -> Tensor:
        """What every expert makes of every token, [expert, batch, time, width]."""
        return self.bank(normed[None])[0]  # type: ignore[no-any-return]


class RoutedFeedStack(nn.Module):
    """`RoutedFeed` for several members, [member, batch, time, width] in and out.

    Expert e of member m is row m x experts + e of the bank, so that one dispatch serves the tokens of all members.
    """

    def __init__(self, choice: Choice, config: FeedExpertsConfig, width: int, members: Sequence[str]):
        super().__init__()
        self.config, names, self.compute = choice.options, config.expert_names, config.router.compute
        self.experts = len(names)
        self.router = RouterStack(config.router, width, names, members)
        self.bank = feeds.build(choice, width, stack=len(members) * self.experts)
        self.drop = Dropout(kind="expert_outputs")
        set_active_share(self.bank, config.router.top_k / self.experts)
        self.shared: nn.Module | None = None
        if config.shared is not None:
            shared = Choice(choice.kind, replace(choice.options, hidden=config.shared))
            self.shared = feeds.build(shared, width, stack=len(members))

    def forward(self, normed: Tensor) -> tuple[Tensor, Routings]:
        routings = self.router(normed)
        output = (self._sparse if is_sparse(self.compute, normed) else self._dense)(normed, routings)
        return (output if self.shared is None else output + self.shared(normed)[0]), routings

    def _sparse(self, normed: Tensor, routings: Routings) -> Tensor:
        chosen = [r.chosen_BTK.flatten(0, 1) + member * self.experts for member, r in enumerate(routings)]
        permutation = sort_by_expert(torch.cat(chosen), len(routings) * self.experts)
        rows, _ = self.bank(permutation.gather(normed.flatten(0, 2)), permutation.groups)
        weights = torch.cat([r.weights_BTK.flatten(0, 1) for r in routings])
        return permutation.combine(self.drop(rows), weights).view_as(normed)

    def _dense(self, normed: Tensor, routings: Routings) -> Tensor:
        outputs, _ = self.bank(normed.repeat_interleave(self.experts, dim=0))
        outputs_MEBTW = self.drop(outputs).unflatten(0, (-1, self.experts))
        weights_MBTE = torch.stack([r.weights_BTN for r in routings]).to(outputs.dtype)
        return torch.einsum("mebtw,mbte->mbtw", outputs_MEBTW, weights_MBTE)
