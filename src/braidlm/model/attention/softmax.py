"""Softmax attention: multi-head, grouped-query and multi-query, with a cache and an optional sliding window."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.registry import Registry
from ..dropout import Dropout
from ..errors import BraidError
from ..routing.dispatch import Permutation
from ..routing.experts import ExpertsConfig
from ..routing.routing import Routings
from ..routing.stacked import linear
from ..span import Span
from .compact import compact_attention, supports_compact_attention

attentions = Registry("attention", third_party=True)

Scope = Literal["all", "routed"]
"""Whose keys and values a routed block has: those of every token (MoEP), or only of the tokens that chose it."""
ABSENT = torch.inf
"""A key that is not there, so that a cache knows it too."""


@dataclass
class AttentionExpertsConfig(ExpertsConfig):
    """A bank of attentions, each with queries, keys, values and output of its own."""

    scope: Scope = "all"
    """Whether an expert reads every token, or only those that chose it."""


@attentions.register("softmax")
class SoftmaxAttention(nn.Module):
    """Causal attention. One fused product makes queries, keys and values."""

    stackable = True

    @dataclass
    class Config:
        heads: int = 8
        """Query heads."""
        kv_heads: int | None = None
        """Key and value heads: as many as `heads` (multi-head), fewer (grouped-query), or 1 (multi-query)."""
        head_dim: int | None = None
        """Channels of a head; by default width / heads."""
        out_projection: bool = True
        """Whether a linear layer mixes the heads; without it their concatenation is the output (PaPaformer)."""
        bias: bool = False
        """Whether the projections have biases."""
        window: int | None = None
        """How many tokens back (itself included) a token sees; by default all."""
        experts: AttentionExpertsConfig | None = None
        """How many attentions of this shape there are to choose from, or their names and router; by default one."""

        def __post_init__(self) -> None:
            if self.heads < 1:
                raise BraidError(f"heads must be at least 1, got {self.heads}")
            if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
                raise BraidError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
            if self.head_dim is not None and self.head_dim < 1:
                raise BraidError(f"head_dim must be at least 1, got {self.head_dim}")
            if self.window is not None and self.window < 1:
                raise BraidError(f"window must be at least 1, got {self.window}")

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
        self.out = linear(stack, inner, width, config.bias) if config.out_projection else None
        self.drop = Dropout(dropout)
        self.query_share = 1.0
        """Of a token's queries, how many are computed; less where a router chooses among the members of a stack."""
        self.cache_slot = 0
        """Which layer of the cache is this one's; the model numbers them."""

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        merged = self._attend(self.qkv(hidden), span)
        return (merged if self.out is None else self.out(merged)), ()

    def forward_routed(self, normed: Tensor, permutation: Permutation, span: Span) -> Tensor:
        """What the members of a stack make of the tokens that chose them: rows of `permutation`.

        `normed` is the stream as the members read it [member or 1, batch, time, width]; or, where only the tokens that
        chose a member exist for it (`span.present`), the rows of those.
        """
        inner = self.heads * self.head_dim
        if span.present is None:
            rows = permutation.gather_per_expert(normed.flatten(1, 2))
            queries = self.qkv(rows, permutation.groups, slice(inner))
            others = self.qkv(normed, columns=slice(inner, None))
            merged = self._attend_rows(queries, others, permutation, span)
        else:
            made = permutation.scatter_per_expert(self.qkv(normed, permutation.groups)).unflatten(1, (-1, span.time))
            merged = permutation.gather_per_expert(self._attend(made, span).flatten(1, 2))
        return merged if self.out is None else self.out(merged, permutation.groups)

    def _attend_rows(self, query_RW: Tensor, others_MBTW: Tensor, permutation: Permutation, span: Span) -> Tensor:
        """What the rows' queries gather from the keys and values, side by side, of every token of their member."""
        plain = span.causal and span.cache is None and span.masks[self.window] is None and not self.drop.probability
        if not (plain and self.kv_heads == self.heads and supports_compact_attention(query_RW, span.time)):
            made = torch.cat(
                (permutation.scatter_per_expert(query_RW).unflatten(1, (-1, span.time)), others_MBTW), dim=-1
            )
            return permutation.gather_per_expert(self._attend(made, span).flatten(1, 2))
        key, value = others_MBTW.flatten(0, 1).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        rotate = span.rotations[self.head_dim]
        if rotate is not None:
            key = rotate(key)
            spread_STNH = permutation.scatter_per_expert(query_RW).view_as(key)
            query_RW = permutation.gather_per_expert(
                rotate(spread_STNH).reshape(len(others_MBTW), -1, query_RW.shape[1])
            )
        return compact_attention(query_RW.unflatten(1, (self.heads, -1)), key, value, permutation).flatten(1)

    def _attend(self, made: Tensor, span: Span) -> Tensor:
        """Queries, keys and values side by side [..., batch, time, channels] to what each query gathers."""
        # The members of a stack are so many more rows of the batch.
        heads_BTNH = made.view(-1, made.shape[-2], self.heads + 2 * self.kv_heads, self.head_dim)
        # Splits, not slices: a slice's gradient is a whole tensor of zeros with a piece filled in.
        both_BTNH, value = heads_BTNH.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        rotate = span.rotations[self.head_dim]
        rotated_BTNH = both_BTNH if rotate is None else rotate(both_BTNH)
        query, key = rotated_BTNH.split((self.heads, self.kv_heads), dim=2)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mask, present = span.masks[self.window], span.present
        # Caches and masks know the batch alone: for them the members are so many more heads.
        folded = self.stack is not None and (span.cache is not None or mask is not None or present is not None)
        if present is not None:
            key = key.masked_fill(~present.flatten(0, 1)[:, None, :, None], ABSENT)
        if folded:
            query, key, value = (self._as_heads(x) for x in (query, key, value))
        if span.cache is not None:
            key, value = span.cache.update(key, value, self.cache_slot)
        if present is not None:
            key, mask = self._mask_absent_keys(key, mask, span)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.drop.probability,
            is_causal=mask is None and span.causal,
            enable_gqa=self.kv_heads != self.heads,
        )
        if folded:
            mixed = self._as_rows(mixed)
        return mixed.transpose(1, 2).reshape(*made.shape[:-1], self.heads * self.head_dim)

    def _mask_absent_keys(self, key: Tensor, mask: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
        """Keys that can be computed with, and a mask [batch, head, time, key] that hides those that are not there."""
        here_BNS = key[..., 0] != ABSENT
        if mask is None:
            time, keys = span.time, key.shape[2]
            mask = torch.ones(time, keys, dtype=torch.bool, device=key.device)
            mask = mask.tril(keys - time) if span.causal else mask
        allowed_BNTS = mask & here_BNS[:, :: self.kv_heads, None]  # the heads of a member are all there or none is
        # A token that is not there itself may have nobody to read: what it makes is not used, but must be a number.
        allowed_BNTS = allowed_BNTS | ~allowed_BNTS.any(-1, keepdim=True)
        return key.masked_fill(~here_BNS[..., None], 0.0), allowed_BNTS.repeat_interleave(self.heads, dim=1)

    def _as_heads(self, x: Tensor) -> Tensor:
        """[member x batch, head, time, dim] to [batch, member x head, time, dim]."""
        return x.unflatten(0, (self.stack, -1)).transpose(0, 1).flatten(1, 2)

    def _as_rows(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.stack, -1)).transpose(0, 1).flatten(0, 1)

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Heads and their size in a cache."""
        return self.kv_heads * (self.stack or 1), self.head_dim

    def score_flops(self, length: int) -> int:
        """FLOPs per token of scores and mixing (not the projections), on average over a sequence of `length`."""
        window = min(self.window or length, length)
        pairs = window * (window + 1) // 2 + (length - window) * window
        return round(4 * self.heads * (self.stack or 1) * self.head_dim * self.query_share * pairs / length)
