"""Mixtures of attention heads: queries and outputs per expert, keys and values shared."""

from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, Sublayer
from braidlm.kernels.lowerings.banks import grouped_linear, grouped_stack
from braidlm.kernels.lowerings.lowering import SharedStack, SharedSums, SublayerLowering, first, lowers
from braidlm.kernels.lowerings.positions import rotation_refusal
from braidlm.kernels.lowerings.router import EXPERTS, add_norm_route, routed_sums, router_refusal
from braidlm.kernels.lowerings.softmax import ATTENTION, library_attention
from braidlm.kernels.lowerings.stick_breaking import attend_by_sticks, biased_linear, stick_breaking_refusal
from braidlm.kernels.routed.token_order import ToRows, ToTokens
from braidlm.model.attention.mixture_of_heads import MixtureOfHeads
from braidlm.model.attention.stick_breaking import StickBreaking


@lowers(MixtureOfHeads)
class MixtureOfHeadsLowering(SublayerLowering):
    honours = EXPERTS | ATTENTION | {"experts.keys", "experts.kv_bias", "current", "rest"}
    routed = True

    def reject(self, part: Any, body: Any) -> str | None:
        return first(
            router_refusal(part.router, body),
            rotation_refusal(body, "no kernel rotates the queries of routed tokens"),
            stick_breaking_refusal(part, body) if isinstance(part.rule, StickBreaking) else None,
        )

    def reads(self, part: Any) -> list[Tensor | None]:
        shared = [] if part.keys_values is None else [part.keys_values.weight, part.keys_values.bias]
        return [part.queries.weight, part.out.weight, *shared]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        top_k = part.router.config.top_k
        return [grouped_stack(part.queries, top_k, rows, dtype, "inputs"), grouped_stack(part.out, top_k, rows, dtype)]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        return routed_sums(part.router, norm)

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        stream, normed, dispatch = add_norm_route(stream, pending, norm, part.router, part.queries, context, True)
        order, slots = (dispatch.permutation, part.kv_heads), context.slots
        rows = grouped_linear(part.queries, normed, dispatch, context, gather=True)
        query = ToTokens.apply(rows, *order, slots.get(part.queries))
        if part.keys_values is None:
            key = value = normed.view(context.batch, context.time, part.kv_heads, -1)
        else:
            key_value = biased_linear(normed, part.keys_values, context)
            key, value = key_value.view(context.batch, context.time, 2, part.kv_heads, -1).unbind(2)
        merged = _attend(part, query.view(context.batch, context.time, -1, part.head_dim), key, value, context)
        attended = ToRows.apply(merged.reshape(query.shape), *order, slots.get(part.out))
        rows = grouped_linear(part.out, attended, dispatch, context, gather=False)
        delta = dispatch.combine(part.drop_output(rows), slots.get(part.out))
        return stream, PendingAdd(delta), (dispatch.routing,)


def _attend(part: Any, query: Tensor, key: Tensor, value: Tensor, context: PassContext) -> Tensor:
    """The output of a part's rule, [batch, time, heads, dim]."""
    if isinstance(part.rule, StickBreaking):
        return attend_by_sticks(part, query, key, value)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return library_attention(part, query, key, value, context).transpose(1, 2)
