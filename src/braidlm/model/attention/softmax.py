"""Softmax attention."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .attention import Attention, AttentionConfig, AttentionRule, attentions
from .eager import eager_attention


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
