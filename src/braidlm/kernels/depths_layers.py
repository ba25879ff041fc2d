"""A mixture of depths by kernels: the choice of the tokens that enter, and those of its block on their rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from braidlm.kernels.context import NO_ADD, PassContext, PendingAdd, Rotation
from braidlm.kernels.depths.choice import Choice
from braidlm.kernels.depths.enter import Enter, EnterConfig
from braidlm.kernels.depths.merge import Merge, MergeConfig
from braidlm.kernels.depths.predict import Predict
from braidlm.model.mixture_of_depths import spread_routing
from braidlm.model.routing.routing import Routing, Routings
from braidlm.model.span import make_masks

RunBlock = Callable[..., tuple[Tensor, PendingAdd | None, Routings]]


def depths_layer(
    stream: Tensor, pending: PendingAdd | None, layer: Any, context: PassContext, run: RunBlock
) -> tuple[Tensor, None, Routings]:
    """Of `MixtureOfDepths` in training; `run` runs its block."""
    inner = layer.router.inner
    delta, bias, slot, dropout, seed = NO_ADD if pending is None else pending.fields
    weight, _ = layer.score.rows()
    count, sums = layer.count(context.time), context.sums_of(layer.score)
    entering = EnterConfig(context.batch, count, sums, context.slots.get(inner), slot, dropout, seed)
    stream, inside, scores, scales, *chosen = Enter.apply(stream, delta, bias, weight, entering)
    choice = Choice(*chosen)
    routing = _prediction(stream.detach(), scales, choice, layer.router, context)
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
    scores, probabilities, chosen, weights = Predict.apply(
        stream, scales, inner_weight, context.casts[router.inner.weight], inner_bias, *router.scores.rows(),
        choice.place_BT, slot,
    )  # fmt: skip
    return Routing(
        router.address,
        router.choices,
        context.unflattened(probabilities),
        context.unflattened(chosen),
        context.unflattened(weights),
        dict(router.config.losses),
        context.unflattened(scores),
    )


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
