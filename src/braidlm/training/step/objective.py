"""The training objective: a batch in, its losses and the routers' readings out."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.model.attention.attention import Softmax
from braidlm.model.attention.positions import NoPositions
from braidlm.model.heads.losses import IGNORED, share_of_batch
from braidlm.model.mixture_of_depths import MixtureOfDepths
from braidlm.model.routing.losses import Evaluator, loads, routing_loss, usages
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routings
from braidlm.model.span import LayerRecord
from braidlm.training.features.extra_losses import ExtraLoss, TrainingPass
from braidlm.training.features.memory import Memory, MemoryCache

if TYPE_CHECKING:  # it needs Triton
    from braidlm.kernels.lowered_model import LoweredModel
    from braidlm.model.modeling_braid import BraidForCausalLM, BraidModel


class BatchLosses(NamedTuple):
    """The losses of one forward pass, and what the routers chose in it."""

    text: Tensor
    routing: Tensor | None  # what routers add to the loss; None where there are none
    usage: dict[str, Tensor]  # for each router by name, the share of the weight that each of its choices has
    picks: dict[str, Tensor]  # for each router that is balanced without a loss, how often each choice was picked
    memory: Memory | None = None  # what the rows remember for their next chunk, if they had a memory
    extra: dict[str, Tensor] = {}  # the recipe's extra losses by name, without their weights
    weighted: Tensor | None = None
    """The text's loss and the extra ones with their weights, where one kernel computes all: this has the gradient."""


class Objective(nn.Module):
    """The model as a function of a batch, by kernels where it is lowered; with what a recipe adds to its loss."""

    def __init__(
        self, model: "BraidForCausalLM", lowered: "LoweredModel | None" = None, extra: Mapping[str, ExtraLoss] = {}
    ):
        super().__init__()
        self.model, self.lowered = model, lowered
        self.extra = nn.ModuleDict(extra)
        self.taken_rows = sum(loss.taken_rows for loss in extra.values())
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
        cache = None if memory is None or continues is None else MemoryCache(memory, continues)
        record = LayerRecord([] if any(loss.needs_layers for loss in self.extra.values()) else None)
        body, two_way = self.model.model, two_way_options(self.model.model, inputs, self.taken_rows, self.by_masks)
        remembered = {} if cache is None else cache.span_options(body, inputs.shape[1])
        hidden, routings, read = self.model.run(inputs, record=record, **{**remembered, **two_way})
        layers = tuple(record.hidden_states or ())
        done = self._without_taken_rows(TrainingPass(self.model, inputs, labels, count, hidden, layers, read=read))
        text = self.model.head.loss(done.hidden, done.labels, done.count, **done.read)
        routing = routing_loss_of(routings, labels, count)
        extra = {name: loss(done) for name, loss in self.extra.items()}
        after = None if cache is None else cache.after(body, inputs.shape[1])
        return BatchLosses(text, routing, *self._readings(routings, labels), after, extra)

    def _by_kernels(self, lowered: "LoweredModel", inputs: Tensor, labels: Tensor, count: Tensor) -> BatchLosses:
        """The losses by the lowered pass, which knows one kind of extra loss: soft targets."""
        weighted, extra = None, {}
        if self.extra:
            ((name, loss),) = self.extra.items()
            soft = loss.soft_targets(inputs)  # type: ignore[operator]
            (weighted, text, extra[name]), routing, routings = lowered.losses(inputs, labels, count, soft)
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


def routers(model: nn.Module) -> Iterator[TopKRouter]:
    """The model's top-k routers."""
    return (module for module in model.modules() if isinstance(module, TopKRouter))


# Passes in which some rows see both ways: there every token attends to its whole row, in the others to those before. It
# is a property of the pass and of no model: evaluation, generation and folders are causal.


def check_two_way(body: "BraidModel", where: str) -> None:
    """Refuse a model whose tokens cannot attend to those after them."""
    problems = []
    for name, part in body.named_modules():
        rule = getattr(part, "rule", part)
        if hasattr(part, "cache_slot") and not isinstance(rule, Softmax):
            problems.append(f"its kind of attention ({type(rule).__name__}) looks back alone ({name})")
        if isinstance(part, MixtureOfDepths):
            what = "which tokens of a mixture of depths enter is learned for texts that are read forward"
            problems.append(f"{what} ({name})")
    if body.head_slots:
        problems.append("its head judges every token by those before it (head)")
    if isinstance(body.positions, NoPositions):
        problems.append("without positions only the causal mask tells the order of tokens (positions)")
    if problems:
        raise BraidError(f"this model cannot read rows both ways: {problems[0]}", where, "Leave out this loss.")


def needs_masks(body: "BraidModel") -> bool:
    """Whether the causal rows cannot simply be computed apart: windows and tokens that are hidden need masks."""
    hides = any(getattr(part, "scope", "all") == "routed" for part in body.modules())
    return hides or body.windows != [None] or body.config._attn_implementation == "eager"


def two_way_options(body: "BraidModel", inputs: Tensor, rows: int, by_masks: bool) -> dict[str, Any]:
    """The options of the span of a pass over `inputs` [batch, time] of which the last `rows` see both ways. Attention
    is computed apart for the two parts, without masks; or `by_masks`, which is the reference, for all rows."""
    if not (rows and by_masks):
        return {"two_way": rows}
    positions = torch.arange(inputs.shape[1], device=inputs.device)
    return {"masks": {window: two_way_mask(window, positions, rows, len(inputs)) for window in body.windows}}


def two_way_mask(window: int | None, positions: Tensor, rows: int, batch: int) -> Tensor:
    """[batch, 1, time, time]: true where a query sees a key; a window reaches as far to both sides."""
    distance = positions[:, None] - positions
    near = distance.abs() < (len(positions) if window is None else window)
    seen = torch.stack((near & (distance >= 0), near))
    return seen[(torch.arange(batch, device=positions.device) >= batch - rows).long(), None]
