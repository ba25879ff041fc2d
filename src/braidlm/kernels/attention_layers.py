"""Stick-breaking attention and mixtures of attention heads, by kernels.

Queries, keys and values are [batch, time, heads, dim]; heads that share a key follow one another.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, add_norm
from braidlm.kernels.dense_layers import Sublayer
from braidlm.kernels.dispatching import add_norm_route, combine_rows
from braidlm.kernels.ops.linear import BiasGradient
from braidlm.kernels.ops.stick_breaking import StickBreaking
from braidlm.kernels.ops.stick_breaking_wide import WideStickBreaking
from braidlm.kernels.routed.token_order import ToRows, ToTokens
from braidlm.kernels.routed_layers import grouped_linear
from braidlm.model.attention.stick_breaking import StickBreaking as StickBreakingRule

MAX_TILE_DIM = 128
"""Channels of a head up to which a tile holds whole rows of queries and keys."""


def stick_breaking_sublayer(
    stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
) -> Sublayer:
    """Of `StickBreakingAttention`."""
    stream, normed = add_norm(stream, pending, norm, None, context)
    qkv = _biased_linear(normed, part.qkv, context).view(context.batch, context.time, -1, part.head_dim)
    query, key, value = qkv.split((part.heads, part.kv_heads, part.kv_heads), dim=2)
    merged = _attend(part, query, key, value, context).flatten(2).flatten(0, 1)
    if part.out is None:
        return stream, PendingAdd(merged), ()
    return stream, PendingAdd(context.linear(merged, part.out), part.out.bias), ()


def mixture_of_heads_sublayer(
    stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext
) -> Sublayer:
    """Of `MixtureOfHeads`."""
    stream, normed, dispatch = add_norm_route(stream, pending, norm, part.router, part.queries, context, True)
    order, slots = (dispatch.permutation, part.kv_heads), context.slots
    rows = grouped_linear(part.queries, normed, dispatch, context, gather=True)
    query = ToTokens.apply(rows, *order, slots.get(part.queries))
    if part.keys_values is None:
        key = value = normed.view(context.batch, context.time, part.kv_heads, -1)
    else:
        key_value = _biased_linear(normed, part.keys_values, context)
        key, value = key_value.view(context.batch, context.time, 2, part.kv_heads, -1).unbind(2)
    merged = _attend(part, query.view(context.batch, context.time, -1, part.head_dim), key, value, context)
    attended = ToRows.apply(merged.reshape(query.shape), *order, slots.get(part.out))
    rows = grouped_linear(part.out, attended, dispatch, context, gather=False)
    delta = combine_rows(part.drop_output(rows), dispatch, slots.get(part.out))
    return stream, PendingAdd(delta), (dispatch.routing,)


def _biased_linear(rows: Tensor, layer: Any, context: PassContext) -> Tensor:
    """A layer's product with its bias, whose gradient no later kernel sums."""
    out = context.linear(rows, layer, with_bias=True)
    return out if layer.bias is None else BiasGradient.apply(out, layer.bias)


def _attend(part: Any, query: Tensor, key: Tensor, value: Tensor, context: PassContext) -> Tensor:
    """The output of a part's rule, [batch, time, heads, dim]."""
    scale = 1 / math.sqrt(part.head_dim)
    if not isinstance(part.rule, StickBreakingRule):
        mask = context.masks[part.window]
        return F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=part.drop.probability,
            is_causal=mask is None,
            enable_gqa=query.shape[2] != key.shape[2],
        ).transpose(1, 2)
    kernel = StickBreaking if part.head_dim <= MAX_TILE_DIM else WideStickBreaking
    output, left = kernel.apply(query, key, value, scale, part.rule.current)
    if part.rule.rest == "current":  # the token's own value gets what no key got
        own = value.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        output = output + left.transpose(1, 2)[..., None].to(value.dtype) * own
    return output
