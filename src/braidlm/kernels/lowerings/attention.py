"""Attention: by softmax (our own kernels for short texts, torch's for long ones) or by breaking sticks, with experts or
without.

Experts have queries, keys and values of their own, or, in a mixture of heads, queries and outputs of their own. Heads
that share a key follow one another.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from braidlm.kernels.attention.causal import AttendRouted, all_queries
from braidlm.kernels.attention.split_heads import SplitHeads
from braidlm.kernels.attention.stick_breaking import StickBreaking
from braidlm.kernels.attention.stick_breaking_wide import WideStickBreaking
from braidlm.kernels.context import PassContext, PendingAdd, Sublayer
from braidlm.kernels.lowerings import experts
from braidlm.kernels.lowerings.ends import positions_refusal, rotation_refusal
from braidlm.kernels.lowerings.lowering import (
    SharedStack,
    SharedSums,
    SublayerLowering,
    dense_stack,
    lowering_of,
    lowers,
    option_refusal,
)
from braidlm.kernels.lowerings.norms import add_norm
from braidlm.kernels.ops.fold import Bank
from braidlm.kernels.ops.linear import BiasGradient, Linear
from braidlm.kernels.replacing import kind_of
from braidlm.kernels.routed.token_order import ToRows, ToTokens
from braidlm.model.attention import stick_breaking
from braidlm.model.attention.attention import SoftmaxAttention
from braidlm.model.attention.experts import MixtureOfHeads, RoutedAttention

ATTENTION = frozenset({"heads", "kv_heads", "head_dim", "bias", "out_bias", "window"})
MAX_ATTENDED = 512
"""Tokens up to which our own softmax attention is the faster one (on an H200)."""
MAX_TILE_DIM = 128
"""Channels of a head up to which a tile of stick-breaking attention holds whole rows of queries and keys."""


@lowers(SoftmaxAttention)
class SoftmaxLowering(SublayerLowering):
    honours = ATTENTION | {"out_projection"}
    has_seeds = True

    def reject(self, part: SoftmaxAttention, body: Any) -> str | None:
        return positions_refusal(body)

    def reads(self, part: Any) -> list[Tensor | None]:
        return [part.qkv.weight, part.qkv.bias, None if part.out is None else part.out.weight]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        return [dense_stack("qkv", part.qkv, rows, dtype, by_blocks=True)]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        sums: list[SharedSums] = lowering_of(norm).sums(norm)
        if part.qkv.bias is not None:
            sums.append(SharedSums((part.qkv.weight.shape, part.head_dim), part.qkv, by_blocks=True))
        return sums

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        stream, normed = add_norm(stream, pending, norm, part.qkv, context)
        merged = self.attend(part, context.linear(normed, part.qkv, with_bias=True), context)
        if part.out is None:
            return stream, PendingAdd(merged), ()
        return stream, PendingAdd(context.linear(merged, part.out), part.out.bias), ()

    def attend(self, part: Any, qkv: Tensor, context: PassContext) -> Tensor:
        """What queries, keys and values with their bias give, [batch * time, heads * dim]."""
        dim, slot, rotation = part.head_dim, context.slots.get(part.qkv), context.rotations[part.head_dim]
        if context.time <= MAX_ATTENDED and part.kv_heads == part.heads and _fills_tile(dim):
            probability = part.drop.probability
            return AttendRouted.apply(
                qkv.view(len(qkv), 1, 3, part.heads, dim), *all_queries(context.batch, context.time, qkv.device),
                1 / math.sqrt(dim), probability, context.seed(part, probability), part.window, None, part.qkv.bias,
                context.sums_of(part.qkv), slot, None, rotation, context.interleaved,
            )  # fmt: skip
        query, key, value = SplitHeads.apply(
            qkv.view(context.batch, context.time, -1, dim), part.qkv.bias, rotation, context.interleaved, part.kv_heads,
            context.sums_of(part.qkv), slot,
        )  # fmt: skip
        mixed = _attend_by_torch(part, query, key, value, context)
        return mixed.transpose(1, 2).reshape(context.batch * context.time, -1)


@lowers(stick_breaking.StickBreakingAttention)
class StickBreakingLowering(SoftmaxLowering):
    honours = ATTENTION | {"out_projection", "current", "rest"}
    has_seeds = False

    def reject(self, part: Any, body: Any) -> str | None:
        return _stick_breaking_refusal(part, body)

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        return []

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        return lowering_of(norm).sums(norm)  # type: ignore[no-any-return]

    def attend(self, part: Any, qkv: Tensor, context: PassContext) -> Tensor:
        qkv = _with_bias_gradient(qkv, part.qkv).view(context.batch, context.time, -1, part.head_dim)
        query, key, value = qkv.split((part.heads, part.kv_heads, part.kv_heads), dim=2)
        return _attend_by_sticks(part, query, key, value).flatten(2).flatten(0, 1)


@lowers(RoutedAttention)
class RoutedAttentionLowering(experts.RoutedLowering):
    honours = experts.EXPERTS | ATTENTION

    def reject(self, part: Any, body: Any) -> str | None:
        return super().reject(part, body) or attention_bank_refusal(part, part.bank, body)

    def reads(self, part: Any) -> list[Tensor | None]:
        return [part.bank.out.weight]

    def folds(self, part: Any) -> dict[Any, Bank]:
        qkv = part.bank.qkv
        return {qkv: Bank(qkv.weight, qkv.bias, concatenated=True)}

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        out = experts.grouped_stack(part.bank.out, part.router.config.top_k, rows, dtype)
        return [dense_stack("bank", part.bank.qkv, rows, dtype), out]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        return [*super().sums(part, norm), attention_bank_sums(part.bank)]

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        bank = part.bank
        stream, normed, dispatch = experts.add_norm_route(
            stream, pending, norm, part.router, bank.qkv, context, permute_on_side=True
        )
        rows = experts.grouped_linear(
            bank.out, attend_bank(bank, normed, dispatch, context), dispatch, context, gather=False
        )
        delta = dispatch.combine(part.drop_output(rows), context.slots.get(bank.out))
        return stream, PendingAdd(delta), (dispatch.routing,)


@lowers(MixtureOfHeads)
class MixtureOfHeadsLowering(experts.RoutedLowering):
    honours = experts.EXPERTS | ATTENTION | {"experts.keys", "experts.kv_bias", "current", "rest"}

    def reject(self, part: Any, body: Any) -> str | None:
        reason = super().reject(part, body) or rotation_refusal(body, "no kernel rotates the queries of routed tokens")
        return reason or (_stick_breaking_refusal(part, body) if _breaks_sticks(part) else None)

    def reads(self, part: Any) -> list[Tensor | None]:
        shared = [] if part.keys_values is None else [part.keys_values.weight, part.keys_values.bias]
        return [part.queries.weight, part.out.weight, *shared]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        top_k = part.router.config.top_k
        return [
            experts.grouped_stack(part.queries, top_k, rows, dtype, "inputs"),
            experts.grouped_stack(part.out, top_k, rows, dtype),
        ]

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        stream, normed, dispatch = experts.add_norm_route(stream, pending, norm, part.router, part.queries, context)
        order, slots = (dispatch.permutation, part.kv_heads), context.slots
        rows = experts.grouped_linear(part.queries, normed, dispatch, context, gather=True)
        queries = ToTokens.apply(rows, *order, slots.get(part.queries))
        query = queries.view(context.batch, context.time, -1, part.head_dim)
        if part.keys_values is None:
            key = value = normed.view(context.batch, context.time, part.kv_heads, -1)
        else:
            key_value = _with_bias_gradient(context.linear(normed, part.keys_values, with_bias=True), part.keys_values)
            key, value = key_value.view(context.batch, context.time, 2, part.kv_heads, -1).unbind(2)
        if _breaks_sticks(part):
            merged = _attend_by_sticks(part, query, key, value)
        else:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            merged = _attend_by_torch(part, query, key, value, context).transpose(1, 2)
        attended = ToRows.apply(merged.reshape(queries.shape), *order, slots.get(part.out))
        rows = experts.grouped_linear(part.out, attended, dispatch, context, gather=False)
        delta = dispatch.combine(part.drop_output(rows), slots.get(part.out))
        return stream, PendingAdd(delta), (dispatch.routing,)


def attention_bank_refusal(part: Any, bank: Any, body: Any) -> str | None:
    """Why kernels do not serve a part with a bank of attentions."""
    if any(getattr(module, "trained_rows", None) is not None for module in part.modules()):
        return "it is frozen in part"  # weights that are folded have a gradient as a whole
    needs = {
        f"{type(bank).__name__} has no kernels for a bank of attentions": kind_of(bank) is SoftmaxAttention,
        "its kernels need out_projection": bank.out is not None,
        "its kernels need as many kv_heads as heads": bank.kv_heads == bank.heads,
        "its kernels need a head_dim that is a power of two from 16 on": _fills_tile(bank.head_dim),
    }
    unmet = next((reason for reason, is_met in needs.items() if not is_met), None)
    unmet = option_refusal(bank, is_bank=True) or unmet
    return unmet or rotation_refusal(body, "no kernel rotates the queries of routed tokens")


def attention_bank_sums(bank: Any) -> SharedSums:
    """The column sums of the biases of queries, keys and values."""
    return SharedSums((bank.heads, bank.qkv.weight.shape), bank.qkv)


def attend_bank(bank: Any, normed: Tensor, dispatch: experts.Dispatch, context: PassContext) -> Tensor:
    """What the routed queries of a bank of attentions gather from all tokens' values, in sorted rows."""
    folded, permutation, slot = context.folded[bank.qkv], dispatch.permutation, context.slots.get(bank.qkv)
    qkv = Linear.apply(normed, folded.weight, folded.cast, folded.bias_cast, slot, True)
    dispatch.wait()
    probability, scale = bank.drop.probability, 1 / math.sqrt(bank.head_dim)
    return AttendRouted.apply(
        qkv.view(len(normed), bank.stack, 3, bank.heads, bank.head_dim), permutation.source,
        permutation.sequence_offsets, permutation.routed, scale, probability, context.seed(bank, probability),
        bank.window, None, folded.bias, context.sums_of(bank.qkv), slot, context.slots.get(bank.out),
    )  # fmt: skip


def _fills_tile(dim: int) -> bool:
    """Whether heads of so many channels fill a tile of our own softmax attention."""
    return dim >= 16 and dim & (dim - 1) == 0


def _breaks_sticks(part: Any) -> bool:
    return isinstance(part.rule, stick_breaking.StickBreaking)


def _stick_breaking_refusal(part: Any, body: Any) -> str | None:
    reason = rotation_refusal(body, "its kernels do not rotate queries and keys")
    if reason is None and part.window is not None:
        return "its kernels do not know the option window"
    return reason or ("its kernels do not drop attention weights" if part.drop.rate else None)


def _with_bias_gradient(rows: Tensor, layer: Any) -> Tensor:
    """A layer's product with its bias, whose gradient no later kernel sums."""
    return rows if layer.bias is None else BiasGradient.apply(rows, layer.bias)


def _attend_by_torch(part: Any, query: Tensor, key: Tensor, value: Tensor, context: PassContext) -> Tensor:
    """torch's attention [batch, heads, time, dim] with a part's window and dropout."""
    mask, probability, shares_keys = context.masks[part.window], part.drop.probability, query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, mask, probability, is_causal=mask is None, enable_gqa=shares_keys
    )


def _attend_by_sticks(part: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output of a part's rule, [batch, time, heads, dim]."""
    kernel = StickBreaking if part.head_dim <= MAX_TILE_DIM else WideStickBreaking
    output, left = kernel.apply(query, key, value, 1 / math.sqrt(part.head_dim), part.rule.current)
    if part.rule.rest == "current":  # the token's own value gets what no key got
        own = value.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        output = output + left.transpose(1, 2)[..., None].to(value.dtype) * own
    return output
