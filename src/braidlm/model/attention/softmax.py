"""Softmax attention, by torch's fused product or by plain products, whose weights can be seen."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Attention, AttentionConfig, AttentionRule, attentions


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
) -> tuple[Tensor, Tensor]:
    """Outputs [batch, head, time, dim] and weights [batch, head, time, key]; several heads may share keys and values.

    `mask` is true where a query sees a key. Without one, with `causal`, it sees those up to its own position.
    """
    shared_by = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared_by, dim=1) for x in (key, value))
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # In float32 or wider: the sum of many small numbers would be rounded.
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = F.dropout(scores.softmax(-1, dtype=wide).to(query.dtype), dropout)
    return weights @ value, weights


class Softmax:
    """The weights are the softmax of the scores."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
    ) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and causal,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def attend_and_show(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
    ) -> tuple[Tensor, Tensor]:
        return eager_attention(query, key, value, mask, causal, dropout)


@attentions.register("softmax")
class SoftmaxAttention(Attention):
    """The weights of the keys are the softmax of the scaled products with the query."""

    @dataclass
    class Config(AttentionConfig):
        pass

    @classmethod
    def rule_of(cls, config: Any) -> AttentionRule:
        return Softmax()
