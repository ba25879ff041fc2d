"""The routers of a stack's members, which score and choose as one where only their weights differ."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .router import RouterConfig, ScoreLinear, TopKRouter
from .routing import Routings


class RouterStack(nn.ModuleDict):
    """A router for each member, by its name: [member, batch, time, width] in, a routing for each member out.

    Each is a module, so that its choices are switched off, balanced and recorded under the names they have alone.
    """

    def __init__(self, config: RouterConfig, width: int, choices: Sequence[str], members: Sequence[str]):
        super().__init__({member: TopKRouter(config, width, choices) for member in members})

    def forward(self, hidden: Tensor) -> Routings:
        together = all(_is_linear(router) for router in self.values())
        return self._together(hidden) if together else self.one_by_one(hidden)

    def one_by_one(self, hidden: Tensor) -> Routings:
        """The reference: each router by itself."""
        return tuple(router(own) for router, own in zip(self.values(), hidden, strict=True))

    def _together(self, hidden: Tensor) -> Routings:
        routers: list[Any] = list(self.values())
        scores = self._scores(hidden)
        # The members are concatenated along the batch.
        one = routers[0].route(scores.flatten(0, 1), f"{routers[0].address} or that of another path")
        names = ("probabilities_BTN", "chosen_BTK", "weights_BTK", "scores_BTN")
        parts = zip(*(getattr(one, name).chunk(len(routers)) for name in names), strict=True)
        return tuple(
            replace(one, name=router.address, losses=dict(one.losses), **dict(zip(names, own, strict=True)))
            for router, own in zip(routers, parts, strict=True)
        )

    def _scores(self, hidden: Tensor) -> Tensor:
        """[member, batch, time, choice], computed as a router does by itself: in float32 or wider."""
        layers: list[Any] = [router.scores for router in self.values()]  # type: ignore[union-attr]
        with torch.autocast(hidden.device.type, enabled=False):
            wide = torch.promote_types(hidden.dtype, torch.float32)
            rows, weight = hidden.flatten(1, 2).to(wide), torch.stack([layer.weight for layer in layers]).to(wide)
            if layers[0].bias is None:
                scores = torch.bmm(rows, weight.mT)
            else:
                bias = torch.stack([layer.bias for layer in layers]).to(wide)
                scores = torch.baddbmm(bias[:, None], rows, weight.mT)
        return scores.unflatten(1, hidden.shape[1:3])


def _is_linear(router: Any) -> bool:
    """Whether its scores are of one layer, and it has no state such as choices that are switched off."""
    has_state = router.inactive or router.balance is not None or router.opening is not None
    return not has_state and router.norm is None and router.inner is None and type(router.scores) is ScoreLinear
