"""Layers: blocks, whose sublayers are served or refused one by one; mixtures of depths, which choose the tokens that
enter a block; parallel blocks of one shape, of which the chosen ones read sorted rows; and projections with experts.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.context import (
    NO_ADD,
    LayerOutput,
    PassContext,
    PendingAdd,
    Rotation,
    Stream,
    add_pending,
    combined,
)
from braidlm.kernels.depths.enter_and_merge import Choice, Enter, EnterConfig, Merge, MergeConfig
from braidlm.kernels.depths.predict import Predict
from braidlm.kernels.lowerings import experts
from braidlm.kernels.lowerings.attention import attend_bank, attention_bank_refusal, attention_bank_sums
from braidlm.kernels.lowerings.feeds import SwiGLULowering, first_linear
from braidlm.kernels.lowerings.lowering import (
    LayerLowering,
    SharedStack,
    SharedSums,
    dense_stack,
    lowering_of,
    lowers,
    option_refusal,
    refusal,
)
from braidlm.kernels.lowerings.norms import form_of
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.ops.fold import Bank
from braidlm.kernels.ops.norm import NormConfig
from braidlm.kernels.replacing import kind_of
from braidlm.kernels.routed.combine import UncombinedRows
from braidlm.kernels.routed.rows import MAX_WIDTH, AddNormRows, ProjectAddNormRows
from braidlm.kernels.side_stream import DeferredGradient
from braidlm.model.dropout import Dropout
from braidlm.model.mixture_of_depths import MixtureOfDepths, spread_routing
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.paths.project import LinearProjections, ProjectStage, SwiGLUProjections
from braidlm.model.routing.routing import Routing
from braidlm.model.span import make_masks
from braidlm.model.stages import Block

BLOCK = frozenset(
    {"norm", "attention", "feed", "layers", "share", "capacity", "every"}
    | {"dropout.attention", "dropout.residual", "dropout.feed", "dropout.expert_outputs", "dropout.experts"}
)


@lowers(Block)
class BlockLowering(LayerLowering):
    honours = BLOCK
    has_seeds = True
    is_one = False

    def reject(self, part: Block, body: Any) -> str | None:
        return None if type(part.drop) is Dropout else f"drop is a {type(part.drop).__name__}"

    def sublayers(self, layer: Block) -> list[tuple[str, Any, Any]]:
        return [("attention", layer.attention_norm, layer.attention), ("feed", layer.feed_norm, layer.feed)]

    def run(self, stream: Any, pending: PendingAdd | None, layer: Block, context: PassContext) -> LayerOutput:
        stream, routings = combined(stream), ()
        for use, (kind, norm, part) in enumerate(self.sublayers(layer)):
            sublayer = lowering_of(part).run if part in context.parts else partial(context.plain.sublayer, kind)
            stream, addition, chosen = sublayer(stream, pending, norm, part, context)
            pending = replace(addition, dropout=context.dropout(layer, use))
            routings += chosen
        return stream, pending, routings


@lowers(MixtureOfDepths)
class MixtureOfDepthsLowering(LayerLowering):
    """In evaluation a router says how many tokens enter, which no kernel knows in advance."""

    honours = BLOCK
    only_training = True

    def reject(self, part: MixtureOfDepths, body: Any) -> str | None:
        """Kernels serve the whole block inside, or no part of it."""
        block: Any = part.block
        parts = (block, block.attention_norm, block.attention, block.feed_norm, block.feed)
        reasons = [refusal(inner, body) for inner in parts] + [experts.router_refusal(part.router, body)]
        if getattr(block.attention, "window", None) is not None:
            reasons.append("its kernels do not know where a window begins among some tokens")
        return next(filter(None, reasons), None)

    def inside(self, layer: MixtureOfDepths, time: int) -> tuple[Any, int]:
        return layer.block, layer.count(time)

    def reads(self, part: Any) -> list[Tensor | None]:
        return [part.router.inner.weight]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        return [dense_stack(MixtureOfDepths, part.router.inner, rows, dtype)]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        return [SharedSums((MixtureOfDepths, part.score.weight.shape), part.score)]

    def run(self, stream: Any, pending: PendingAdd | None, layer: Any, context: PassContext) -> LayerOutput:
        stream = combined(stream)
        delta, bias, slot, dropout = NO_ADD if pending is None else pending.fields
        weight, _ = layer.score.rows()
        entering = EnterConfig(
            context.batch, layer.count(context.time), context.sums_of(layer.score), delta_slot=slot, dropout=dropout,
            read_slot=context.slots.get(layer.router.inner),
        )  # fmt: skip
        stream, inside, scores, scales, *chosen = Enter.apply(stream, delta, bias, weight, entering)
        choice = Choice(*chosen)
        routing = _prediction(stream.detach(), scales, choice, layer.router, context)
        run = lowering_of(layer.block).run
        output, addition, routings = run(inside, None, layer.block, _context_inside(context, choice.index_BK))
        delta, bias, slot, dropout = NO_ADD if addition is None else addition.fields
        merging = MergeConfig(choice, delta_slot=slot, dropout=dropout)
        stream = Merge.apply(stream, inside, output, delta, bias, scores, merging)
        if routings:
            entered_BT = choice.place_BT >= 0
            routings = tuple(spread_routing(inner, choice.index_BK, entered_BT) for inner in routings)
        return stream, None, (routing, *routings)


def _prediction(stream: Tensor, scales: Tensor, choice: Choice, router: Any, context: PassContext) -> Routing:
    """The router's own prediction of the choice, which it learns from."""
    (inner_weight, inner_bias), slot = router.inner.rows(), context.slots.get(router.inner)
    predicted = Predict.apply(
        stream, scales, inner_weight, context.casts[router.inner.weight], inner_bias, *router.scores.rows(),
        choice.place_BT, slot,
    )  # fmt: skip
    return context.routing(router, *predicted)


def _context_inside(context: PassContext, index_BK: Tensor) -> PassContext:
    """The pass over some tokens of each row, which are at positions of their own; they are in causal order."""
    time, index = index_BK.shape[1], index_BK.flatten()
    rotations: dict[int, Rotation | None] = {
        dim: None if rotation is None else (*rotation[:2], index) for dim, rotation in context.rotations.items()
    }
    masks = make_masks(list(context.masks), time, 0, None, context.device)
    inside = replace(context, time=time, rotations=rotations, masks=masks)
    inside.side = context.side
    return inside


@lowers(ParallelLayer)
class ParallelLowering(LayerLowering):
    honours = {"paths", "layers", "join", "to", "share", "stacked"}

    def reject(self, part: Any, body: Any) -> str | None:
        """Kernels serve routed blocks of one shape at the stream's own width."""
        reason = refusal(part.join, body)
        if reason is not None:
            return f"join: {reason}"
        if part.stack is None or part.enter is not None or len(part.join.leave) or part.join.out is not None:
            return "its paths are not of one shape at the stream's width"
        if len(part.stack) != 1:
            return "its paths have more than one block in a layer"
        block = part.stack[0]
        reason = option_refusal(block.attention_norm, is_bank=True)
        if reason is None and form_of(block.attention_norm) is None:
            reason = "its norm cannot be folded into the product behind it"
        reason = reason or option_refusal(block.feed, is_bank=True)
        return reason or attention_bank_refusal(part, block.attention, body)

    def reads(self, part: Any) -> list[Tensor | None]:
        return [part.stack[0].attention.out.weight, part.stack[0].feed.out.weight]

    def folds(self, part: Any) -> dict[Any, Bank]:
        block = part.stack[0]
        qkv, into = block.attention.qkv, first_linear(block.feed)
        return {
            qkv: _folded_bank(qkv, block.attention_norm, concatenated=True),
            into: _folded_bank(into, block.feed_norm, concatenated=False),
        }

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        block, top_k = part.stack[0], part.join.router.config.top_k
        return [
            dense_stack("bank", block.attention.qkv, rows, dtype),
            experts.grouped_stack(block.attention.out, top_k, rows, dtype),
            experts.grouped_stack(first_linear(block.feed), top_k, rows, dtype, summed=True),
            experts.grouped_stack(block.feed.out, top_k, rows, dtype),
        ]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        router = part.join.router  # the norm is folded in, so that only the router's gradients are summed
        fused = experts.has_few_choices(router)
        return [experts.router_sums(router, fused, ParallelLayer), attention_bank_sums(part.stack[0].attention)]

    def run(self, stream: Stream, pending: PendingAdd | None, layer: Any, context: PassContext) -> LayerOutput:
        block, router = layer.stack[0], layer.join.router
        # The norm's kernel reads the stream's gradient itself where it also routes, for few choices.
        deferred = DeferredGradient() if experts.has_few_choices(router) else None
        summed, normed, dispatch = experts.add_norm_route(
            stream, pending, block.attention_norm, router, block.attention.qkv, context, folded=True,
            deferred=deferred, permute_on_side=True,
        )  # fmt: skip
        bank, probability, form = block.attention, block.drop.probability, form_of(block.feed_norm)
        attended = attend_bank(bank, normed, dispatch, context)
        assert form is not None
        norm = NormConfig(
            form.eps, form.centred, dropout=DropoutUse(probability, context.seed(block, probability)),
            read_slot=context.slots.get(first_linear(block.feed)), delta_slot=context.slots.get(bank.out),
            deferred=deferred,
        )  # fmt: skip
        if summed.shape[1] <= MAX_WIDTH:
            cast = context.casts[bank.out.weight]
            rows, normed = ProjectAddNormRows.apply(
                attended, bank.out.weight, cast, bank.out.bias, summed, dispatch.permutation, norm
            )
        else:
            delta = experts.grouped_linear(bank.out, attended, dispatch, context, gather=False)
            rows, normed = AddNormRows.apply(summed, delta, dispatch.permutation, norm)
        base = (rows, DropoutUse(probability, context.seed(block, probability, 1)))
        fed = experts.grouped_feed(block.feed, normed, dispatch, context, base)
        slot = None if probability else context.slots.get(block.feed.out)
        return UncombinedRows(fed, dispatch.weights, dispatch.permutation, slot), None, (dispatch.routing,)


def _folded_bank(linear: Any, norm: Any, concatenated: bool) -> Bank:
    form = form_of(norm)
    assert form is not None
    return Bank(linear.weight, linear.bias, form.weight, form.bias, concatenated)


@lowers(LinearProjections, SwiGLUProjections)
class ExpertProjectionLowering(SwiGLULowering):
    """The bank inside a projection, which has no dropout."""

    honours = {"names", "kind", "hidden"} | {f"router.{option}" for option in experts.ROUTER}
    has_seeds = False

    def inner_dropout(self, feed: SwiGLUProjections, context: PassContext) -> DropoutUse:
        return NO_DROPOUT


@lowers(ProjectStage)
class ProjectionLowering(LayerLowering):
    honours = experts.EXPERTS | {"to", "bias", "experts.kind", "experts.hidden"}

    def reject(self, part: ProjectStage, body: Any) -> str | None:
        if part.experts is None:
            return "a projection without experts is one product already"
        if kind_of(part.experts) not in (LinearProjections, SwiGLUProjections):
            return f"{kind_of(part.experts).__name__} has no kernel here"
        return experts.router_refusal(part.experts.router, body)

    def reads(self, part: Any) -> list[Tensor | None]:
        gated = isinstance(part.experts, SwiGLUProjections)
        return [*([part.experts.gate_up.weight] if gated else []), part.experts.out.weight]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        router = part.experts.router
        return [experts.router_sums(router, experts.has_few_choices(router), ProjectStage)]

    def run(self, stream: Any, pending: PendingAdd | None, layer: Any, context: PassContext) -> LayerOutput:
        stream, bank = combined(stream), layer.experts
        # With dropout the gradients of what is pending and of the stream differ.
        slot = None if pending is None or pending.dropout.probability else pending.slot
        dispatch, stream = experts.route(bank.router, add_pending(stream, pending), context, slot)
        if isinstance(bank, SwiGLUProjections):
            rows = experts.grouped_feed(bank, stream, dispatch, context)
        else:
            rows = experts.grouped_linear(bank.out, stream, dispatch, context, gather=True)
        return dispatch.combine(rows), None, (dispatch.routing,)
