"""Attention: projections, a rotation, a cache, and a rule that turns scores into weights: the softmax, here.

The rule is what kinds of attention differ in. Heads may be multi-head, grouped-query or multi-query.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.ranges import Heads, Length, Size
from ..config.registry import Registry
from ..dropout import Dropout
from ..errors import BraidError
from ..routing.dispatch import Permutation
from ..routing.router import ExpertsConfig
from ..routing.routing import Routings
from ..routing.stacked import linear
from ..span import Span
from .backend import BackendLayer, attend_by_layers

attentions = Registry("attention", third_party=True)

Scope = Literal["all", "routed"]
"""Whether a routed attention attends to all tokens (MoEP), or only to those that chose it."""
ABSENT = torch.inf
"""Marks the keys of tokens that a member does not see; it is part of the key, so that a cache keeps it too."""


class Softmax:
    """The rule of softmax attention, and the pattern for others: how queries weigh keys.

    Tensors are [batch, head, time, dim]; several heads may share keys and values. `mask` is true where a query sees a
    key. Without one, with `causal`, it sees those up to its own position.
    """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
    ) -> Tensor:
        """The outputs, without keeping the weights: torch's fused product."""
        plain, shared = mask is None and causal, query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, plain, enable_gqa=shared)

    def attend_and_show(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """The outputs and the weights [batch, head, time, key], by plain products."""
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = (query @ key.mT) * query.shape[-1] ** -0.5
        if mask is None and causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        # In float32 or wider: the sum of many small numbers would be rounded.
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = F.dropout(scores.softmax(-1, dtype=wide).to(query.dtype), dropout)
        return weights @ value, weights


@dataclass
class AttentionExpertsConfig(ExpertsConfig):
    """A bank of attentions, each with its own projections of queries and outputs."""

    scope: Scope = "all"
    """Whether an expert attends to all tokens, or only to those that chose it."""
    keys: Literal["own", "shared", "stream"] = "own"
    """Whether each expert has its own projection of keys and values (MoEP), all share one (ModuleFormer's mixture of
    attention heads), or the normalised stream itself is both (ModuleFormer where attention is as wide as the model)."""
    kv_bias: bool | None = None
    """Whether the shared projection of keys and values has a bias; by default as the other projections."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_bias is not None and self.keys != "shared":
            raise BraidError("kv_bias is for a shared projection of keys and values (keys 'shared')")
        if self.keys != "own" and self.scope != "all":
            raise BraidError("experts that share keys attend to all tokens: scope 'routed' needs keys 'own'")


@dataclass
class AttentionConfig:
    """The options of every kind of attention."""

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


class AttentionHeads(nn.Module):
    """Heads without projections: from queries, keys and values to outputs, by way of the rotation and the cache."""

    records_weights = True  # whether it can show its attention weights

    def __init__(self, config: AttentionConfig, width: int, rule: Any, dropout: float):
        super().__init__()
        if config.head_dim is None and width % config.heads:
            raise BraidError(f"width {width} does not divide into {config.heads} heads; set head_dim")
        self.config, self.rule, self.window = config, rule, config.window
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.head_dim or width // config.heads
        self.inner = self.heads * self.head_dim  # the concatenated channels of all heads
        self.drop = Dropout(dropout)
        self.copies = 1
        """How many attentions of these heads there are: the members of a stack, or the experts of a bank."""
        self.query_share = 1.0
        """The share of the queries that is computed; less than 1 if a router chooses among experts."""
        self.pair_share = 1.0
        """The share of the pairs of query and key that there is; less than 1 if tokens pass by the layer."""
        self.cache_slot = 0  # the index of this layer in the cache, set by the model
        self.backend_layers: list[BackendLayer] = []  # its layers of another library, where that computes attention

    @property
    def query_heads(self) -> int:
        """The query heads of all of them together."""
        return self.copies * self.heads

    def cached(self, query: Tensor, key: Tensor, value: Tensor, span: Span) -> Tensor:
        """Outputs [batch, head, time, dim] of queries; keys and values go by way of the cache."""
        mask, present = span.masks[self.window], span.present
        if present is not None:
            absent_BNT = ~present.transpose(0, 1).repeat_interleave(key.shape[1] // len(present), dim=1)
            key = key.masked_fill(absent_BNT[..., None], ABSENT)
        if span.cache is not None:
            key, value = span.cache.update(key, value, self.cache_slot)
        if present is not None:
            key, mask = self._mask_absent_keys(key, mask, span)
            mask = mask if mask.shape[1] == 1 else mask.repeat_interleave(self.heads, dim=1)
        return self.weigh(query, key, value, mask, span)

    def weigh(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, span: Span) -> Tensor:
        """Outputs [batch, head, time, dim] by the rule; the weights are recorded if the caller asked for them."""
        if span.backend is not None:
            dropout = self.drop.probability
            return attend_by_layers(self.backend_layers, query, key, value, mask, dropout, span.backend)
        if span.two_way:
            assert mask is None
            queries, keys, values = (x.split((len(x) - span.two_way, span.two_way)) for x in (query, key, value))
            parts = zip(queries, keys, values, (True, False), strict=True)
            return torch.cat([self.rule.attend(q, k, v, None, way, self.drop.probability) for q, k, v, way in parts])
        inputs = (query, key, value, mask, span.causal, self.drop.probability)
        if not span.eager:
            return self.rule.attend(*inputs)  # type: ignore[no-any-return]
        output, weights = self.rule.attend_and_show(*inputs)
        if span.record is not None:
            span.record.add_weights(self.shown(weights, span))
        return output  # type: ignore[no-any-return]

    def shown(self, weights: Tensor, span: Span) -> Tensor:
        """The attention weights as the caller sees them, [batch, head, time, key]: 0 for absent tokens."""
        if span.present is None:
            return weights
        present_BNT = span.present.transpose(0, 1).repeat_interleave(weights.shape[1] // len(span.present), dim=1)
        return weights * present_BNT[..., None]

    def _mask_absent_keys(self, key: Tensor, mask: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
        """The keys with zeros for absent ones, and a mask [batch, member, time, key] that hides these."""
        present_BNS = key[..., 0] != ABSENT
        if mask is None:
            time, keys = span.time, key.shape[2]
            mask = torch.ones(time, keys, dtype=torch.bool, device=key.device)
            mask = mask.tril(keys - time) if span.causal else mask
        # A token is present in all heads of a member or none.
        allowed_BMTS = mask & present_BNS[:, :: self.kv_heads, None]
        # An absent token may see no key at all: its output is not used, but NaN would spread through gradients.
        allowed_BMTS = allowed_BMTS | ~allowed_BMTS.any(-1, keepdim=True)
        return key.masked_fill(~present_BNS[..., None], 0.0), allowed_BMTS

    def score_flops(self, length: int) -> int:
        """FLOPs per token of attention without the projections, averaged over a sequence of `length`."""
        window = min(self.window or length, length)
        pairs = self.pair_share * (window * (window + 1) // 2 + (length - window) * window)
        return round(4 * self.inner * self.copies * self.query_share * pairs / length)


class Attention(AttentionHeads):
    """Causal attention with its projections; one product computes queries, keys and values.

    With `stack`, several attentions of one shape are computed as one, each with projections of its own.
    """

    stackable = True
    Config = AttentionConfig

    @classmethod
    def rule_of(cls, config: Any) -> Any:
        """The rule of this kind of attention, which has the methods of `Softmax`."""
        raise NotImplementedError("each kind of attention has its rule")

    def __init__(self, config: AttentionConfig, width: int, dropout: float = 0.0, stack: int | None = None):
        super().__init__(config, width, self.rule_of(config), dropout)
        self.stack, self.copies = stack, stack or 1
        if not config.out_projection and self.inner != width:
            raise BraidError(f"without out_projection heads * head_dim ({self.inner}) must equal the width ({width})")
        self.qkv = linear(stack, width, self.inner + 2 * self.kv_heads * self.head_dim, config.bias)
        out_bias = config.bias if config.out_bias is None else config.out_bias
        self.out = linear(stack, self.inner, width, out_bias) if config.out_projection else None
        self.cache_shape = (self.kv_heads * self.copies, self.head_dim)  # number and size of the heads in a cache

    def forward(self, hidden: Tensor, span: Span) -> tuple[Tensor, Routings]:
        heads = self._attend(self.qkv(hidden), span)
        return (heads if self.out is None else self.out(heads)), ()

    def forward_routed(self, normed: Tensor, permutation: Permutation, span: Span) -> Tensor:
        """Run each member of a stack on the tokens that chose it; the output has the rows of `permutation`. `normed` is
        the normalised stream [member or 1, batch, time, width]; or, if members see only the tokens that chose them
        (`span.present`), the rows of those."""
        if span.present is None:
            rows = permutation.gather_per_expert(normed.flatten(1, 2))
            queries = self.qkv(rows, permutation.groups, slice(self.inner))
            keys_values = self.qkv(normed, columns=slice(self.inner, None))
            heads = self._attend_rows(queries, keys_values, permutation, span)
        else:
            qkv = permutation.scatter_per_expert(self.qkv(normed, permutation.groups)).unflatten(1, (-1, span.time))
            heads = permutation.gather_per_expert(self._attend(qkv, span).flatten(1, 2))
        return heads if self.out is None else self.out(heads, permutation.groups)

    def _attend_rows(self, query_RW: Tensor, kv_MBTW: Tensor, permutation: Permutation, span: Span) -> Tensor:
        """Attention of the rows' queries to the concatenated keys and values of all tokens for each member."""
        query_MBTW = permutation.scatter_per_expert(query_RW).unflatten(1, (-1, span.time))
        qkv = torch.cat((query_MBTW, kv_MBTW), dim=-1)
        return permutation.gather_per_expert(self._attend(qkv, span).flatten(1, 2))

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
        if self._is_folded(span):
            query, key, value = (self._as_heads(x) for x in (query, key, value))
            output = self.cached(query, key, value, span).unflatten(1, (self.stack, -1))
            output = output.transpose(0, 1).flatten(0, 1)
        else:
            output = self.cached(query, key, value, span)
        return output.transpose(1, 2).reshape(*qkv.shape[:-1], self.inner)

    def _is_folded(self, span: Span) -> bool:
        """Caches, masks and other libraries have the size of the batch: members are concatenated along the heads."""
        masked = span.masks[self.window] is not None or span.two_way
        kept = span.cache is not None or span.backend is not None
        return self.stack is not None and bool(masked or kept or span.present is not None)

    def _as_heads(self, x: Tensor) -> Tensor:
        """[member x batch, head, time, dim] to [batch, member x head, time, dim]."""
        return x.unflatten(0, (self.stack, -1)).transpose(0, 1).flatten(1, 2)

    def shown(self, weights: Tensor, span: Span) -> Tensor:
        return super().shown(weights if self.stack is None or self._is_folded(span) else self._as_heads(weights), span)


@attentions.register("softmax")
class SoftmaxAttention(Attention):
    """The weights of the keys are the softmax of the scaled products with the query."""

    @classmethod
    def rule_of(cls, config: Any) -> Softmax:
        return Softmax()
