"""Blocks, whose attention and feed-forward part are served or refused one by one, and mixtures of depths, which choose
the tokens that enter a block.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.context import NO_ADD, LayerOutput, PassContext, PendingAdd, Rotation, combined
from braidlm.kernels.depths.enter_and_merge import Choice, Enter, EnterConfig, Merge, MergeConfig
from braidlm.kernels.depths.predict import Predict
from braidlm.kernels.lowerings.experts import router_refusal
from braidlm.kernels.lowerings.lowering import (
    LayerLowering,
    SharedStack,
    SharedSums,
    dense_stack,
    lowering_of,
    lowers,
    refusal,
)
from braidlm.model.dropout import Dropout
from braidlm.model.mixture_of_depths import MixtureOfDepths, spread_routing
from braidlm.model.routing.routing import Routing, Routings
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
        stream, probability = combined(stream), layer.drop.probability
        routings: Routings = ()
        for use, (kind, norm, part) in enumerate(self.sublayers(layer)):
            sublayer = lowering_of(part).run if part in context.parts else partial(context.plain.sublayer, kind)
            stream, addition, chosen = sublayer(stream, pending, norm, part, context)
            pending = replace(addition, dropout=probability, seed=context.seed(layer, probability, use))
            routings += chosen
        return stream, pending, routings


@lowers(MixtureOfDepths)
class MixtureOfDepthsLowering(LayerLowering):
    """In evaluation a router says how many tokens enter, which no kernel knows in advance."""

    honours = BLOCK
    only_training = True

    def reject(self, part: MixtureOfDepths, body: Any) -> str | None:
        """All of its block is served, or none of it."""
        block: Any = part.block
        parts = (block, block.attention_norm, block.attention, block.feed_norm, block.feed)
        reasons = [refusal(inner, body) for inner in parts] + [router_refusal(part.router, body)]
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
        delta, bias, slot, dropout, seed = NO_ADD if pending is None else pending.fields
        weight, _ = layer.score.rows()
        count, sums = layer.count(context.time), context.sums_of(layer.score)
        entering = EnterConfig(context.batch, count, sums, context.slots.get(layer.router.inner), slot, dropout, seed)
        stream, inside, scores, scales, *chosen = Enter.apply(stream, delta, bias, weight, entering)
        choice = Choice(*chosen)
        routing = _prediction(stream.detach(), scales, choice, layer.router, context)
        run = lowering_of(layer.block).run
        output, addition, routings = run(inside, None, layer.block, _context_inside(context, choice.index_BK))
        delta, bias, slot, dropout, seed = NO_ADD if addition is None else addition.fields
        stream = Merge.apply(stream, inside, output, delta, bias, scores, MergeConfig(choice, slot, dropout, seed))
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
