"""Passes in which some rows see both ways: there every token attends to its whole row, in the others to those before.

It is a property of the pass and of no model: evaluation, generation and folders are causal.
"""

from typing import Any

import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.model.attention.positions import NoPositions
from braidlm.model.attention.softmax import Softmax
from braidlm.model.mixture_of_depths import MixtureOfDepths
from braidlm.model.modeling_braid import BraidModel


def check_two_way(body: BraidModel, where: str) -> None:
    """Refuse a model whose tokens cannot attend to those after them."""
    for name, part in body.named_modules():
        rule = getattr(part, "rule", part)
        if hasattr(part, "cache_slot") and not isinstance(rule, Softmax):
            raise _refused(f"its kind of attention ({type(rule).__name__}) looks back alone", name, where)
        if isinstance(part, MixtureOfDepths):
            raise _refused(
                "which tokens of a mixture of depths enter is learned for texts that are read forward", name, where
            )
    if body.head_slots:
        raise _refused("its head judges every token by those before it", "head", where)
    if isinstance(body.positions, NoPositions):
        raise _refused("without positions only the causal mask tells the order of tokens", "positions", where)


def _refused(why: str, name: str, where: str) -> BraidError:
    return BraidError(f"this model cannot read rows both ways: {why} ({name})", where, "Leave out this loss.")


def needs_masks(body: BraidModel) -> bool:
    """Whether the causal rows cannot simply be computed apart: windows and tokens that are hidden need masks."""
    hides = any(getattr(part, "scope", "all") == "routed" for part in body.modules())
    return hides or body.windows != [None] or body.config._attn_implementation == "eager"


def two_way_options(body: BraidModel, inputs: Tensor, rows: int, by_masks: bool) -> dict[str, Any]:
    """The options of the span of a pass over `inputs` [batch, time] of which the last `rows` see both ways.

    Attention is computed apart for the two parts, without masks; or `by_masks`, which is the reference, for all rows.
    """
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
