"""A mixture of depths by kernels: those of its block, on the tokens that enter it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, add_pending
from braidlm.model.mixture_of_depths import entering, spread_routing
from braidlm.model.routing.routing import Routing, Routings
from braidlm.model.span import make_masks

Choose = Callable[[Any, Tensor], tuple[Tensor, Tensor, Routing]]
RunBlock = Callable[..., tuple[Tensor, PendingAdd | None, Routings]]


def depths_layer(
    stream: Tensor, pending: PendingAdd | None, layer: Any, context: PassContext, choose: Choose, run: RunBlock
) -> tuple[Tensor, None, Routings]:
    """Of `MixtureOfDepths` in training; `choose` is its choice of tokens, perhaps compiled, `run` runs its block."""
    stream = add_pending(stream, pending)
    with context.autocast():
        weight_BT, entered_BT, routing = choose(layer, context.unflattened(stream))
    index_BK, flat_R = entering(entered_BT, layer.count(context.time))
    inside = stream.index_select(0, flat_R)
    output, addition, routings = run(inside, None, layer.block, _context_inside(context, index_BK))
    added = (add_pending(output, addition) - inside) * weight_BT.flatten().index_select(0, flat_R)[:, None]
    stream = stream.index_add(0, flat_R, added.to(stream.dtype))
    return stream, None, (routing, *(spread_routing(inner, index_BK, entered_BT) for inner in routings))


def _context_inside(context: PassContext, index_BK: Tensor) -> PassContext:
    """The pass over some tokens of each row, which are at positions of their own; they are in causal order."""
    time, flat = index_BK.shape[1], index_BK.flatten()
    rotations = {
        dim: None if tables is None else (tables[0][flat], tables[1][flat]) for dim, tables in context.rotations.items()
    }
    masks = make_masks(list(context.masks), time, 0, None, context.device)
    inside = replace(context, time=time, rotations=rotations, masks=masks, slots={}, grouped_slots={}, sums={})
    inside.side = context.side
    return inside
