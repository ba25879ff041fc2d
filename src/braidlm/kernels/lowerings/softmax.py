"""Softmax attention: our own kernels for short texts, and the library's for long ones."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.kernels.attention.causal import AttendRouted, all_queries
from braidlm.kernels.attention.split_heads import SplitHeads
from braidlm.kernels.context import PassContext, PendingAdd, Sublayer
from braidlm.kernels.lowerings.feeds import dense_stack
from braidlm.kernels.lowerings.lowering import SharedStack, SharedSums, SublayerLowering, lowering_of, lowers
from braidlm.kernels.lowerings.norms import add_norm
from braidlm.kernels.lowerings.positions import positions_refusal
from braidlm.model.attention.softmax import SoftmaxAttention

ATTENTION = frozenset({"heads", "kv_heads", "head_dim", "bias", "out_bias", "window"})
MAX_ATTENDED = 512
"""Tokens up to which our own attention is the faster one (on an H200)."""


@lowers(SoftmaxAttention)
class SoftmaxAttentionLowering(SublayerLowering):
    honours = ATTENTION | {"out_projection"}
    has_seeds = True

    def reject(self, part: SoftmaxAttention, body: Any) -> str | None:
        return positions_refusal(body)

    def reads(self, part: Any) -> list[Tensor | None]:
        return [part.qkv.weight, part.qkv.bias, None if part.out is None else part.out.weight]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        return [dense_stack("qkv", part.qkv, rows, dtype)]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        sums: list[SharedSums] = lowering_of(norm).sums(norm)
        if part.qkv.bias is not None:
            sums.append(SharedSums((part.qkv.weight.shape, part.head_dim), part.qkv, by_blocks=True))
        return sums

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        stream, normed = add_norm(stream, pending, norm, part.qkv, context)
        qkv = context.linear(normed, part.qkv, with_bias=True)
        merged = (_attend if _has_faster_attention(part, context) else _attend_by_torch)(part, qkv, context)
        if part.out is None:
            return stream, PendingAdd(merged), ()
        return stream, PendingAdd(context.linear(merged, part.out), part.out.bias), ()


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
    mixed = library_attention(attention, query, key, value, context)
    return mixed.transpose(1, 2).reshape(context.batch * context.time, -1)


def library_attention(part: Any, query: Tensor, key: Tensor, value: Tensor, context: PassContext) -> Tensor:
    """torch's attention [batch, heads, time, dim] with a part's window and dropout."""
    mask = context.masks[part.window]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=part.drop.probability,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
