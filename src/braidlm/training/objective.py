"""The training objective: a batch in, its losses and the routers' readings out."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM, share_of_batch
from braidlm.model.routing.losses import Evaluator, loads, routing_loss, usages
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routings

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.planned_pass import LoweredModel


class BatchLosses(NamedTuple):
    """Of one forward pass."""

    text: Tensor
    routing: Tensor | None
    """What routers add to the loss; None where there are none."""
    usage: dict[str, Tensor]
    """For each router by name, the share of the weight that each of its choices has."""
    picks: dict[str, Tensor]
    """For each router that is balanced without a loss, how often each choice was picked."""


class Objective(nn.Module):
    """The model as a function of a batch, by kernels where it is lowered."""

    def __init__(self, model: BraidForCausalLM, lowered: "LoweredModel | None" = None):
        super().__init__()
        self.model, self.lowered = model, lowered
        self.balanced = {router.address for router in routers(model) if router.balance is not None}

    def forward(self, inputs: Tensor, labels: Tensor, count: Tensor) -> BatchLosses:
        if self.lowered is None:
            text, routing, routings = plain_losses(self.model, inputs, labels, count)
            return BatchLosses(text, routing, *self._readings(routings, labels))
        text, routing, routings = self.lowered.losses(inputs, labels, count)
        read = partial(self._readings, routings, labels)
        return BatchLosses(text, routing, *self.lowered.on_side(read, routings, labels))

    def _readings(
        self, routings: Routings, labels: Tensor, evaluate: Evaluator | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Usage of all routers, and the picks of those that are balanced without a loss."""
        real = labels != IGNORED
        balanced = tuple(routing for routing in routings if routing.name in self.balanced)
        picks = {name: share * real.sum() for name, share in loads(balanced, real, evaluate).items()}
        return usages(routings, real, evaluate), picks


def plain_losses(
    model: BraidForCausalLM, inputs: Tensor, labels: Tensor, count: Tensor | float | None = None
) -> tuple[Tensor, Tensor | None, Routings]:
    """The loss of labels at the position predicting them, what routers add to it, and their routings."""
    embedded = model.model.embedding(inputs)
    hidden, routings = model.model.stream(embedded, model.model.span(embedded))
    real = labels != IGNORED
    routing = routing_loss(routings, real) * share_of_batch(real, count) if routings else None
    return model.head.loss(hidden, labels, count), routing, routings


def routers(model: nn.Module) -> Iterator[TopKRouter]:
    """The model's top-k routers."""
    return (module for module in model.modules() if isinstance(module, TopKRouter))
