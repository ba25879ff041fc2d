"""Softmax attention."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..routing.dispatch import Permutation
from ..span import Span
from .attention import Attention, AttentionConfig, AttentionRule, attentions
from .compact import row_attentions, supports_compact_attention
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

    def _attend_rows(self, query_RW: Tensor, kv_MBTW: Tensor, permutation: Permutation, span: Span) -> Tensor:
        """On a CPU, the queries of tokens that chose no member cost nothing."""
        plain = span.causal and span.cache is None and span.masks[self.window] is None and not self.drop.probability
        compact = not (span.eager or span.two_way) and supports_compact_attention(query_RW, span.time)
        if not (plain and compact and self.kv_heads == self.heads):
            return super()._attend_rows(query_RW, kv_MBTW, permutation, span)
        key, value = kv_MBTW.flatten(0, 1).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        rotate = span.rotations[self.head_dim]
        if rotate is not None:
            key = rotate(key)
            query_STNH = rotate(permutation.scatter_per_expert(query_RW).view_as(key))
            query_RW = permutation.gather_per_expert(query_STNH.reshape(len(kv_MBTW), -1, query_RW.shape[1]))
        output: Tensor = row_attentions["routed"](query_RW.unflatten(1, (self.heads, -1)), key, value, permutation)
        return output.flatten(1)
