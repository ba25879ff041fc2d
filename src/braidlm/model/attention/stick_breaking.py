"""Stick-breaking attention (ModuleFormer, equation 4): each query attends to the latest keys that match.

A query breaks a stick from the nearest key backwards: a key with score z gets the share sigmoid(z) of what the keys
after it left. What the keys are not given says where they stand, so no positions are needed, and a model works at
lengths that it was not trained at.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..exporting import is_exporting
from .attention import Attention, AttentionConfig, attentions

QUERIES_AT_ONCE = 128  # queries whose weights are in memory at once; the backward pass computes them again

Rest = Literal["dropped", "current"]


def stick_breaking_weights(score_BNTS: Tensor, visible_BNTS: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the keys, and what is left of each stick [batch, head, time]. In log space, since products of many
    small numbers vanish: the weight of a key with score z is exp(z - the sum of log(1 + exp z) over it and the keys
    after it)."""
    wide = score_BNTS.to(torch.promote_types(score_BNTS.dtype, torch.float32))
    broken = F.softplus(wide).masked_fill(~visible_BNTS, 0.0)
    from_here_on = broken.flip(-1).cumsum(-1).flip(-1)
    weights = (wide - from_here_on).masked_fill(~visible_BNTS, -torch.inf).exp()
    return weights, (-broken.sum(-1)).exp()


class StickBreaking:
    """The rule, with its options."""

    def __init__(self, current: bool, rest: Rest):
        self.current, self.rest = current, rest

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
    ) -> Tensor:
        if is_exporting():
            return self.attend_and_show(query, key, value, mask, causal, dropout)[0]
        past = key.shape[2] - query.shape[2]
        outputs = []
        for begin in range(0, query.shape[2], QUERIES_AT_ONCE):
            own = query[:, :, begin : begin + QUERIES_AT_ONCE]
            end = past + begin + own.shape[2]  # no query of this chunk sees a later key
            chunk_mask = None if mask is None else mask[:, :, begin : begin + own.shape[2], :end]
            inputs = (own, key[:, :, :end], value[:, :, :end], chunk_mask, causal, dropout)
            if torch.is_grad_enabled() and query.shape[2] > QUERIES_AT_ONCE:
                outputs.append(checkpoint(self.attend_and_show, *inputs, use_reentrant=False)[0])
            else:
                outputs.append(self.attend_and_show(*inputs)[0])
        return torch.cat(outputs, dim=2)

    def attend_and_show(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
    ) -> tuple[Tensor, Tensor]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        position = torch.arange(key.shape[2], device=query.device)
        # A mask says which key is a query's own, the last that it sees: a fixed cache has room after that.
        own = position[-query.shape[2] :, None] if mask is None else (mask * position).amax(-1, keepdim=True)
        visible = position < own + self.current
        visible = visible if mask is None else visible & mask
        weights, left_BNT = stick_breaking_weights((query @ key.mT) * query.shape[-1] ** -0.5, visible)
        if self.rest == "current":
            weights = weights.scatter_add(-1, own.expand(*weights.shape[:3], 1), left_BNT[..., None])
        weights = F.dropout(weights.to(query.dtype), dropout)
        return weights @ value, weights


@attentions.register("stick_breaking")
class StickBreakingAttention(Attention):
    """Each query attends to the latest keys that match, and needs no positions (ModuleFormer)."""

    @dataclass
    class Config(AttentionConfig):
        current: bool = True
        """Whether a token attends to itself."""
        rest: Rest = "dropped"
        """What becomes of the part of a stick that no key got: nothing, or the token's own value gets it."""

    @classmethod
    def rule_of(cls, config: Any) -> StickBreaking:
        return StickBreaking(config.current, config.rest)
