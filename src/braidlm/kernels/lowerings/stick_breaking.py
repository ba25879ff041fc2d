"""Stick-breaking attention. Queries, keys and values are [batch, time, heads, dim]; heads that share a key follow one
another."""

import math
from typing import Any

from torch import Tensor

from braidlm.kernels.attention.stick_breaking import StickBreaking
from braidlm.kernels.attention.stick_breaking_wide import WideStickBreaking
from braidlm.kernels.context import PassContext, PendingAdd, Sublayer
from braidlm.kernels.lowerings.lowering import SharedSums, SublayerLowering, first, lowering_of, lowers, unless
from braidlm.kernels.lowerings.norms import add_norm
from braidlm.kernels.lowerings.positions import rotation_refusal
from braidlm.kernels.lowerings.softmax import ATTENTION
from braidlm.kernels.ops.linear import BiasGradient
from braidlm.model.attention.stick_breaking import StickBreakingAttention

MAX_TILE_DIM = 128
"""Channels of a head up to which a tile holds whole rows of queries and keys."""


@lowers(StickBreakingAttention)
class StickBreakingLowering(SublayerLowering):
    honours = ATTENTION | {"out_projection", "current", "rest"}

    def reject(self, part: Any, body: Any) -> str | None:
        return stick_breaking_refusal(part, body)

    def reads(self, part: Any) -> list[Tensor | None]:
        return [part.qkv.weight, part.qkv.bias, None if part.out is None else part.out.weight]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        return lowering_of(norm).sums(norm)  # type: ignore[no-any-return]

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        stream, normed = add_norm(stream, pending, norm, None, context)
        qkv = biased_linear(normed, part.qkv, context).view(context.batch, context.time, -1, part.head_dim)
        query, key, value = qkv.split((part.heads, part.kv_heads, part.kv_heads), dim=2)
        merged = attend_by_sticks(part, query, key, value).flatten(2).flatten(0, 1)
        if part.out is None:
            return stream, PendingAdd(merged), ()
        return stream, PendingAdd(context.linear(merged, part.out), part.out.bias), ()


def stick_breaking_refusal(part: Any, body: Any) -> str | None:
    """Why the kernels do not serve an attention that breaks sticks."""
    return first(
        rotation_refusal(body, "its kernels do not rotate queries and keys"),
        unless(part.window is None, "its kernels do not know the option window"),
        unless(not part.drop.rate, "its kernels do not drop attention weights"),
    )


def biased_linear(rows: Tensor, layer: Any, context: PassContext) -> Tensor:
    """A layer's product with its bias, whose gradient no later kernel sums."""
    out = context.linear(rows, layer, with_bias=True)
    return out if layer.bias is None else BiasGradient.apply(out, layer.bias)


def attend_by_sticks(part: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output of a part's rule, [batch, time, heads, dim]."""
    kernel = StickBreaking if part.head_dim <= MAX_TILE_DIM else WideStickBreaking
    output, left = kernel.apply(query, key, value, 1 / math.sqrt(part.head_dim), part.rule.current)
    if part.rule.rest == "current":  # the token's own value gets what no key got
        own = value.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        output = output + left.transpose(1, 2)[..., None].to(value.dtype) * own
    return output
