"""Softmax attention: multi-head, grouped-query and multi-query, with a cache and an optional sliding window."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Heads, Length, Size
from ..config.registry import Registry
from ..dropout import Dropout
from ..errors import BraidError
from ..routing.dispatch import Permutation
from ..routing.experts import ExpertsConfig
from ..routing.routing import Routings
from ..routing.stacked import linear
from ..span import Span
from .compact import compact_attention, supports_compact_attention
from .eager import eager_attention

attentions = Registry("attention", third_party=True)

Scope = Literal["all", "routed"]
"""Whether a routed attention attends to all tokens (MoEP), or only to those that chose it."""
ABSENT = torch.inf
"""Marks the keys of tokens that a member does not see; it is part of the key, so that a cache keeps it too."""


@dataclass
class AttentionExpertsConfig(ExpertsConfig):
    """A bank of attentions, each with its own projections of queries, keys, values and outputs."""

    scope: Scope = "all"
    """Whether an expert attends to all tokens, or only to those that chose it."""


@attentions.register("softmax")
class SoftmaxAttention(nn.Module):
    """Causal attention. One product computes queries, keys and values."""

    stackable = True
    records_weights = True
    """Whether it can show its attention weights."""

    @dataclass
    class Config:
        heads: Heads = 8
        """Query heads."""
        kv_heads: Heads | None = None
        """Key and value heads: as many as `heads` (multi-head), fewer (grouped-query), or 1 (multi-query)."""
        head_dim: Size | None = None
        """Channels of a head; by default width / heads."""
        out_projection: bool = True
        """Whether there is an output projection; without one the heads are only concatenated (PaPaformer)."""
        bias: bool = False
        """Whether the projections have biases."""
        out_bias: bool | None = None
        """Whether the output projection has one; by default as the others."""
        window: Length | None = None
        """Number of previous tokens, itself included, that a token attends to; by default all."""
        experts: AttentionExpertsConfig | None = None
        """The number of experts of this shape, or their names and router; by default one without a router."""

        def __post_init__(self) -> None:
            if self.kv_heads and self.heads % self.kv_heads:
                raise BraidError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    def __init__(self, config: Config, width: int, dropout: float = 0.0, stack: int | None = None):
        super().__init__()
        if config.head_dim is None and width % config.heads:
            raise BraidError(f"width {width} does not divide into {config.heads} heads; set head_dim")
        self.config, self.stack = config, stack
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.head_dim or width // config.heads
        self.window = config.window
        inner = self.heads * self.head_dim
        if not config.out_projection and inner != width:
            raise BraidError(f"without out_projection heads * head_dim ({inner}) must equal the width ({width})")
        self.qkv = linear(stack, width, inner + 2 * self.kv_heads * self.head_dim, config.bias)
        out_bias = config.bias if config.out_bias is None else config.out_bias
        self.out = linear(stack, inner, width, out_bias) if config.out_projection else None
        self.drop = Dropout(dropout)
        self.query_share = 1.0
        """The share of the queries that is computed; less than 1 if a router chooses among the members of a stack."""
        self.cache_slot = 0
        """The index of this layer in the cache, set by the model."""

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        heads = self._attend(self.qkv(hidden), span)
        return (heads if self.out is None else self.out(heads)), ()

    def forward_routed(self, normed: Tensor, permutation: Permutation, span: Span) -> Tensor:
        """Run each member of a stack on the tokens that chose it; the output has the rows of `permutation`.

        `normed` is the normalised stream [member or 1, batch, time, width]; or, if members see only the tokens that
        chose them (`span.present`), the rows of those.
        """
        inner = self.heads * self.head_dim
        if span.present is None:
            rows = permutation.gather_per_expert(normed.flatten(1, 2))
            queries = self.qkv(rows, permutation.groups, slice(inner))
            keys_values = self.qkv(normed, columns=slice(inner, None))
            heads = self._attend_rows(queries, keys_values, permutation, span)
        else:
            qkv = permutation.scatter_per_expert(self.qkv(normed, permutation.groups)).unflatten(1, (-1, span.time))
            heads = permutation.gather_per_expert(self._attend(qkv, span).flatten(1, 2))
        return heads if self.out is None else self.out(heads, permutation.groups)

    def _attend_rows(self, query_RW: Tensor, kv_MBTW: Tensor, permutation: Permutation, span: Span) -> Tensor:
        """Attention of the rows' queries to the concatenated keys and values of all tokens for each member."""
        plain = span.causal and span.cache is None and span.masks[self.window] is None and not self.drop.probability
        compact = not span.eager and supports_compact_attention(query_RW, span.time)
        if not (plain and compact and self.kv_heads == self.heads):
            query_MBTW = permutation.scatter_per_expert(query_RW).unflatten(1, (-1, span.time))
            qkv = torch.cat((query_MBTW, kv_MBTW), dim=-1)
            return permutation.gather_per_expert(self._attend(qkv, span).flatten(1, 2))
        key, value = kv_MBTW.flatten(0, 1).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        rotate = span.rotations[self.head_dim]
        if rotate is not None:
            key = rotate(key)
            query_STNH = rotate(permutation.scatter_per_expert(query_RW).view_as(key))
            query_RW = permutation.gather_per_expert(query_STNH.reshape(len(kv_MBTW), -1, query_RW.shape[1]))
        return compact_attention(query_RW.unflatten(1, (self.heads, -1)), key, value, permutation).flatten(1)

    def _attend(self, qkv: Tensor, span: Span) -> Tensor:
        """Attention, from concatenated queries, keys and values [..., batch, time, channels] to concatenated heads."""
        # The members of a stack are concatenated along the batch.
        heads_BTNH = qkv.view(-1, qkv.shape[-2], self.heads + 2 * self.kv_heads, self.head_dim)
        # Splits, not slices: the gradient of each slice would be a tensor of the whole size, mostly zeros.
        query_key_BTNH, value = heads_BTNH.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        rotate = span.rotations[self.head_dim]
        if rotate is not None:
            query_key_BTNH = rotate(query_key_BTNH)
        query, key = query_key_BTNH.split((self.heads, self.kv_heads), dim=2)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mask, present = span.masks[self.window], span.present
        # Caches and masks have the size of the batch, so for them the members are concatenated along the heads.
        folded = self.stack is not None and (span.cache is not None or mask is not None or present is not None)
        if present is not None:
            key = key.masked_fill(~present.flatten(0, 1)[:, None, :, None], ABSENT)
        if folded:
            query, key, value = (self._as_heads(x) for x in (query, key, value))
        if span.cache is not None:
            key, value = span.cache.update(key, value, self.cache_slot)
        if present is not None:
            key, mask = self._mask_absent_keys(key, mask, span)
        if span.eager:
            output, weights = eager_attention(query, key, value, mask, span.causal, self.drop.probability)
            if span.record is not None:
                weights = weights if folded or self.stack is None else self._as_heads(weights)
                span.record.add_weights(weights if present is None else weights * self._present_queries(present))
        else:
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=self.drop.probability,
                is_causal=mask is None and span.causal,
                enable_gqa=self.kv_heads != self.heads,
            )
        if folded:
            output = self._as_batch(output)
        return output.transpose(1, 2).reshape(*qkv.shape[:-1], self.heads * self.head_dim)

    def _mask_absent_keys(self, key: Tensor, mask: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
        """The keys with zeros for absent ones, and a mask [batch, head, time, key] that hides these."""
        present_BNS = key[..., 0] != ABSENT
        if mask is None:
            time, keys = span.time, key.shape[2]
            mask = torch.ones(time, keys, dtype=torch.bool, device=key.device)
            mask = mask.tril(keys - time) if span.causal else mask
        allowed_BNTS = (
            mask & present_BNS[:, :: self.kv_heads, None]
        )  # a token is present in all heads of a member or none
        # An absent token may see no key at all: its output is not used, but NaN would spread through gradients.
        allowed_BNTS = allowed_BNTS | ~allowed_BNTS.any(-1, keepdim=True)
        return key.masked_fill(~present_BNS[..., None], 0.0), allowed_BNTS.repeat_interleave(self.heads, dim=1)

    def _present_queries(self, present_MBT: Tensor) -> Tensor:
        """[batch, member x head, time, 1]: whether a member sees the token, and so attends to anything for it."""
        return present_MBT.transpose(0, 1).repeat_interleave(self.heads, dim=1)[..., None]

    def _as_heads(self, x: Tensor) -> Tensor:
        """[member x batch, head, time, dim] to [batch, member x head, time, dim]."""
        return x.unflatten(0, (self.stack, -1)).transpose(0, 1).flatten(1, 2)

    def _as_batch(self, x: Tensor) -> Tensor:
        """The inverse of `_as_heads`."""
        return x.unflatten(1, (self.stack, -1)).transpose(0, 1).flatten(0, 1)

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Number and size of the heads in a cache."""
        return self.kv_heads * (self.stack or 1), self.head_dim

    def score_flops(self, length: int) -> int:
        """FLOPs per token of attention without the projections, averaged over a sequence of `length`."""
        window = min(self.window or length, length)
        pairs = window * (window + 1) // 2 + (length - window) * window
        return round(4 * self.heads * (self.stack or 1) * self.head_dim * self.query_share * pairs / length)
