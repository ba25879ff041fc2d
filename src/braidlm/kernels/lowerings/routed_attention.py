"""Attention experts that have queries, keys and values of their own."""

from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, Sublayer
from braidlm.kernels.lowerings.banks import (
    attend_bank,
    attention_bank_refusal,
    attention_bank_stack,
    attention_bank_sums,
    grouped_linear,
    grouped_stack,
)
from braidlm.kernels.lowerings.lowering import (
    Fold,
    SharedStack,
    SharedSums,
    SublayerLowering,
    bank_refusal,
    first,
    lowers,
    partly_frozen,
)
from braidlm.kernels.lowerings.positions import rotation_refusal
from braidlm.kernels.lowerings.router import EXPERTS, add_norm_route, routed_sums, router_refusal
from braidlm.kernels.lowerings.softmax import ATTENTION
from braidlm.kernels.ops.fold import Bank
from braidlm.model.attention.routed import RoutedAttention


@lowers(RoutedAttention)
class RoutedAttentionLowering(SublayerLowering):
    honours = EXPERTS | ATTENTION
    routed = True

    def reject(self, part: Any, body: Any) -> str | None:
        return first(
            router_refusal(part.router, body),
            partly_frozen(part),
            bank_refusal(part.bank),
            attention_bank_refusal(part.bank),
            rotation_refusal(body, "no kernel rotates the queries of routed tokens"),
        )

    def reads(self, part: Any) -> list[Tensor | None]:
        return [part.bank.out.weight]

    def folds(self, part: Any) -> list[Fold]:
        qkv = part.bank.qkv
        return [Fold(qkv, Bank(qkv.weight, qkv.bias), concatenated=True)]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        out = grouped_stack(part.bank.out, part.router.config.top_k, rows, dtype)
        return [attention_bank_stack(part.bank, rows, dtype), out]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        return [*routed_sums(part.router, norm), attention_bank_sums(part.bank)]

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        bank = part.bank
        stream, normed, dispatch = add_norm_route(
            stream, pending, norm, part.router, bank.qkv, context, reads_normed=True, permute_on_side=True
        )
        rows = grouped_linear(bank.out, attend_bank(bank, normed, dispatch, context), dispatch, context, gather=False)
        delta = dispatch.combine(part.drop(rows), context.slots.get(bank.out))
        return stream, PendingAdd(delta), (dispatch.routing,)
