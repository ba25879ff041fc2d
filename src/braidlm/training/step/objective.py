"""The training objective: a batch in, its losses and the routers' readings out."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from braidlm.core import console
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.heads.losses import IGNORED
from braidlm.model.modeling_braid import BraidForCausalLM, share_of_batch
from braidlm.model.routing.losses import Evaluator, loads, routing_loss, usages
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routings
from braidlm.model.span import LayerRecord
from braidlm.training.features.extra_losses import ExtraLoss, TrainingPass
from braidlm.training.features.memory import Memory, MemoryCache
from braidlm.training.step.two_way import needs_masks, two_way_options

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.lowered_model import LoweredModel


class BatchLosses(NamedTuple):
    """The losses of one forward pass, and what the routers chose in it."""

    text: Tensor
    routing: Tensor | None
    """What routers add to the loss; None where there are none."""
    usage: dict[str, Tensor]
    """For each router by name, the share of the weight that each of its choices has."""
    picks: dict[str, Tensor]
    """For each router that is balanced without a loss, how often each choice was picked."""
    memory: Memory | None = None
    """What the rows remember for their next chunk, if they had a memory."""
    extra: dict[str, Tensor] = {}
    """The recipe's extra losses by name, without their weights."""
    weighted: Tensor | None = None
    """The text's loss and the extra ones with their weights, where one kernel computes all: this has the gradient."""


class Objective(nn.Module):
    """The model as a function of a batch, by kernels where it is lowered; with what a recipe adds to its loss."""

    def __init__(
        self,
        model: BraidForCausalLM,
        lowered: "LoweredModel | None" = None,
        extra: dict[str, ExtraLoss] | None = None,
    ):
        super().__init__()
        self.model, self.lowered = model, lowered
        self.extra = nn.ModuleDict(extra)
        self.taken_rows = sum(loss.taken_rows for loss in (extra or {}).values())
        self.by_masks = self.taken_rows > 0 and needs_masks(model.model)
        self.balanced = {router.address for router in routers(model) if router.balance is not None}

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor,
        count: Tensor,
        memory: Memory | None = None,
        continues: Tensor | None = None,
    ) -> BatchLosses:
        """With a memory, `continues` [row] says whose text goes on where the memory ends."""
        if self.lowered is not None:
            return self._by_kernels(self.lowered, inputs, labels, count)
        cache = None
        if memory is not None:
            assert continues is not None
            cache = MemoryCache(memory, continues)
        record = LayerRecord([] if any(loss.needs_layers for loss in self.extra.values()) else None)
        body, two_way = self.model.model, two_way_options(self.model.model, inputs, self.taken_rows, self.by_masks)
        remembered = {} if cache is None else cache.span_options(body, inputs.shape[1])
        hidden, routings, read = self.model.run(inputs, record=record, **{**remembered, **two_way})
        layers = tuple(record.hidden_states or ())
        done = TrainingPass(self.model, inputs, labels, count, hidden, layers, read=read)
        done = self._without_taken_rows(done)
        text = self.model.head.loss(done.hidden, done.labels, done.count, **done.read)
        routing = routing_loss_of(routings, labels, count)
        extra = {name: loss(done) for name, loss in self.extra.items()}
        after = None if cache is None else cache.after(self.model.model, inputs.shape[1])
        return BatchLosses(text, routing, *self._readings(routings, labels), after, extra)

    def _by_kernels(self, lowered: "LoweredModel", inputs: Tensor, labels: Tensor, count: Tensor) -> BatchLosses:
        """The losses by the lowered pass, which knows one kind of extra loss: soft targets."""
        weighted, extra = None, {}
        if self.extra:
            ((name, loss),) = self.extra.items()
            soft = loss.soft_targets(inputs)  # type: ignore[operator]
            (weighted, text, extra[name]), routing, routings = lowered.taught_losses(inputs, labels, count, soft)
        else:
            text, routing, routings = lowered.losses(inputs, labels, count)
        readings = lowered.on_side(partial(self._readings, routings, labels), routings, labels)
        return BatchLosses(text, routing, *readings, extra=extra, weighted=weighted)

    def _without_taken_rows(self, done: TrainingPass) -> TrainingPass:
        """The pass of the rows that the loss of the text is of; the others are beside it."""
        if not self.taken_rows:
            return done
        count = done.count
        for loss in self.extra.values():
            count = loss.text_count(count)  # type: ignore[operator]
        sizes = (len(done.inputs) - self.taken_rows, self.taken_rows)
        parts = [x.split(sizes) for x in (done.inputs, done.labels, done.hidden)]
        (inputs, labels, hidden), taken = zip(*parts, strict=True)
        layers = tuple(layer[: sizes[0]] for layer in done.layers)
        beside = TrainingPass(done.model, taken[0], taken[1], done.count, taken[2])
        return TrainingPass(done.model, inputs, labels, count, hidden, layers, beside)

    def _readings(
        self, routings: Routings, labels: Tensor, evaluate: Evaluator | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Usage of all routers, and the picks of those that are balanced without a loss."""
        real = labels != IGNORED
        balanced = tuple(routing for routing in routings if routing.name in self.balanced)
        picks = {name: share * real.sum() for name, share in loads(balanced, real, evaluate).items()}
        return usages(routings, real, evaluate), picks


def routing_loss_of(routings: Routings, labels: Tensor, count: Tensor | float | None) -> Tensor | None:
    """What the routers add to the loss of a micro-batch; None where there are none."""
    real = labels != IGNORED
    return routing_loss(routings, real) * share_of_batch(real, count) if routings else None


def use_routing_losses(config: BraidConfig, losses: dict[str, float] | None) -> None:
    """Give every router of a model to be built these losses in place of its own."""
    if losses is None:
        return
    before = config.architecture
    config.architecture = _with_losses(before, losses)
    if losses and config.architecture == _with_losses(before, {}):
        console.warn("training.routing_losses has no effect: the model has no routers")


def _with_losses(part: Any, losses: dict[str, float]) -> Any:
    """An architecture, or a part of one, whose routers have these losses."""
    if isinstance(part, dict):
        return {k: dict(losses) if k == "losses" else _with_losses(v, losses) for k, v in part.items()}
    return [_with_losses(v, losses) for v in part] if isinstance(part, list) else part


def routers(model: nn.Module) -> Iterator[TopKRouter]:
    """The model's top-k routers."""
    return (module for module in model.modules() if isinstance(module, TopKRouter))
