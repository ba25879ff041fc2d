"""Attention and feed-forward without experts, by kernels.

Each function gets the stream, what is pending, the norm and the part of a block; it returns the stream with the pending
addition, the part's own addition, and no routings.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from braidlm.kernels.context import PassContext, PendingAdd, add_norm
from braidlm.kernels.ops.activation import Activation
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.ops.split_heads import SplitHeads
from braidlm.kernels.routed.attention import AttendRouted, all_queries
from braidlm.model.feed.feeds import GEGLU, MLP, SwiGLU
from braidlm.model.routing.routing import Routings

FEEDS = (MLP, SwiGLU, GEGLU)
"""The feed-forward parts without experts that have kernels."""
MAX_ATTENDED = 512
"""Tokens up to which our own attention is the faster one (on an H200)."""

Sublayer = tuple[Tensor, PendingAdd, Routings]


def attention_sublayer(
    stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
) -> Sublayer:
    """Of `SoftmaxAttention`."""
    stream, normed = add_norm(stream, pending, norm, part.qkv, context)
    qkv = context.linear(normed, part.qkv, with_bias=True)
    merged = (_attend if _has_faster_attention(part, context) else _attend_by_torch)(part, qkv, context)
    if part.out is None:
        return stream, PendingAdd(merged), ()
    return stream, PendingAdd(context.linear(merged, part.out), part.out.bias), ()


def feed_sublayer(stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
    """Of `MLP`, `SwiGLU` and `GEGLU`."""
    stream, normed = add_norm(stream, pending, norm, first_linear(part), context)
    return stream, feed_forward(part, normed, context), ()


def feed_forward(feed: Any, rows: Tensor, context: PassContext) -> PendingAdd:
    """The addition of a feed-forward part that reads normalised rows."""
    into, slot = first_linear(feed), context.slots.get(feed.out)
    kind, gated = activation_of(feed)
    inner = context.linear(rows, into)
    outer = Activation.apply(
        inner, into.bias, kind, gated, context.sums_of(into), context.slots.get(into), slot,
        inner_dropout(feed, context),
    )  # fmt: skip
    return PendingAdd(context.linear(outer, feed.out), feed.out.bias, slot)


def first_linear(feed: Any) -> nn.Linear:
    """The layer that a feed-forward part begins with."""
    first: nn.Linear = getattr(feed, "gate_up", None) or feed.up
    return first


def activation_of(feed: Any) -> tuple[str, bool]:
    """The name of a feed-forward part's activation, and whether it is gated."""
    if isinstance(feed, MLP):
        return feed.config.activation, False
    return "gelu" if isinstance(feed, GEGLU) else "silu", True  # gated projections are Swish-gated too


def inner_dropout(feed: Any, context: PassContext) -> DropoutUse:
    """Of a feed-forward part's activation; gated projections have none."""
    if not isinstance(feed, FEEDS):
        return NO_DROPOUT
    return DropoutUse(feed.drop.probability, context.seed(feed, feed.drop.probability))


def _has_faster_attention(attention: Any, context: PassContext) -> bool:
    """Whether our own kernels are faster than the library's, which needs queries and keys apart."""
    dim: int = attention.head_dim
    fits = attention.kv_heads == attention.heads and dim >= 16 and dim & (dim - 1) == 0
    return fits and context.time <= MAX_ATTENDED


def _attend(attention: Any, qkv: Tensor, context: PassContext) -> Tensor:
    probability, scale = attention.drop.probability, 1 / math.sqrt(attention.head_dim)
    return AttendRouted.apply(
        qkv.view(len(qkv), 1, 3, attention.heads, attention.head_dim),
        *all_queries(context.batch, context.time, qkv.device), scale, probability, context.seed(attention, probability),
        attention.window, None, attention.qkv.bias, context.sums_of(attention.qkv), context.slots.get(attention.qkv),
        None, context.rotations[attention.head_dim], context.interleaved,
    )  # fmt: skip


def _attend_by_torch(attention: Any, qkv: Tensor, context: PassContext) -> Tensor:
    query, key, value = SplitHeads.apply(
        qkv.view(context.batch, context.time, -1, attention.head_dim),
        attention.qkv.bias,
        context.rotations[attention.head_dim],
        context.interleaved,
        attention.kv_heads,
        context.sums_of(attention.qkv),
        context.slots.get(attention.qkv),
    )
    mask = context.masks[attention.window]
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=attention.drop.probability,
        is_causal=mask is None,
        enable_gqa=attention.kv_heads != attention.heads,
    )
    return mixed.transpose(1, 2).reshape(context.batch * context.time, -1)
