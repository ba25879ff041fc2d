"""Softmax attention: multi-head, grouped-query and multi-query, with a cache and an optional sliding window."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .dropout import Dropout
from .errors import BraidError
from .registry import Registry
from .routing import Routings
from .span import Span
from .stacked import linear

attentions = Registry("attention", third_party=True)


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
        self.stack = stack
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
        self.cache_slot = 0
        """Which layer of the cache is this one's; the model numbers them."""

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        made = self.qkv(hidden)
        # The members of a stack are so many more rows of the batch.
        heads_BTNH = made.view(-1, made.shape[-2], self.heads + 2 * self.kv_heads, self.head_dim)
        # Splits, not slices: a slice's gradient is a whole tensor of zeros with a piece filled in.
        both_BTNH, value = heads_BTNH.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        turn = span.rotations[self.head_dim]
        turned_BTNH = both_BTNH if turn is None else turn(both_BTNH)
        query, key = turned_BTNH.split((self.heads, self.kv_heads), dim=2)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mask = span.masks[self.window]
        # Caches and masks know the batch alone: for them the members are so many more heads.
        folded = self.stack is not None and (span.cache is not None or mask is not None)
        if folded:
            query, key, value = (self._as_heads(x) for x in (query, key, value))
        if span.cache is not None:
            key, value = span.cache.update(key, value, self.cache_slot)
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
        merged = mixed.transpose(1, 2).reshape(*made.shape[:-1], self.heads * self.head_dim)
        return (merged if self.out is None else self.out(merged)), ()

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
        return round(4 * self.heads * (self.stack or 1) * self.head_dim * pairs / length)
