"""A stack of feed-forward parts with experts: those of all members are one bank."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..config.registry import Choice
from ..dropout import Dropout
from ..routing.dispatch import is_sparse, sort_by_expert
from ..routing.experts import set_active_share
from ..routing.router_stack import RouterStack
from ..routing.routing import Routings
from .feeds import FeedExpertsConfig, feeds
from .routed import feed_stacks


@feed_stacks.register("with_experts")
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
