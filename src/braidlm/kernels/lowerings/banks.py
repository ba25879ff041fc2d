"""Banks of experts: their products for rows that are sorted by expert, and the gradient slots of their matrices."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.attention.causal import AttendRouted
from braidlm.kernels.context import PassContext
from braidlm.kernels.gradient_stacks import GradientStack, StackedRows
from braidlm.kernels.lowerings.feeds import make_dense_stack
from braidlm.kernels.lowerings.lowering import SharedStack, SharedSums, first, lowering_of, unless
from braidlm.kernels.lowerings.router import Dispatch
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.ops.fold import Folded
from braidlm.kernels.ops.linear import Linear
from braidlm.kernels.replacing import kind_of
from braidlm.kernels.routed.gradient_stacks import Gathered, GroupedGradientStack
from braidlm.kernels.routed.grouped.layers import GroupedFeed, GroupedLinear
from braidlm.kernels.routed.permutation import TILE, row_bound
from braidlm.model.attention.softmax import SoftmaxAttention


@dataclass
class Base:
    """Rows that the output of a feed-forward part is added to, after dropout."""

    rows: Tensor
    dropout: DropoutUse


def grouped_linear(layer: Any, rows: Tensor, dispatch: Dispatch, context: PassContext, gather: bool) -> Tensor:
    """The layer of each row's expert; `rows` are tokens where they are to be gathered."""
    weight, bias = layer.rows()
    return GroupedLinear.apply(
        rows, weight, context.casts[layer.weight], bias, dispatch.permutation, gather,
        context.slots.get(layer),
    )  # fmt: skip


def grouped_feed(bank: Any, rows: Tensor, dispatch: Dispatch, context: PassContext, base: Base | None = None) -> Tensor:
    """The feed-forward part of each row's expert; `rows` are sorted rows where there is a base, and else tokens."""
    (up, out), lowering = feed_matrices(bank, context), lowering_of(bank)
    base_rows, dropout = (None, NO_DROPOUT) if base is None else (base.rows, base.dropout)
    return GroupedFeed.apply(
        rows, up.weight, up.cast, up.bias, out.weight, out.cast, out.bias, base_rows, dispatch.permutation,
        lowering.activation(bank), lowering.gated, base is None, dropout, lowering.inner_dropout(bank, context),
        context.slots.get(lowering.first_linear(bank)), context.slots.get(bank.out),
    )  # fmt: skip


def feed_matrices(bank: Any, context: PassContext) -> tuple[Folded, Folded]:
    """The matrices and biases of a bank of feed-forward parts, with a norm folded in where there is one."""
    into = lowering_of(bank).first_linear(bank)
    up, (out_weight, out_bias) = context.folded.get(into), bank.out.rows()
    if up is None:
        weight, bias = into.rows()
        up = Folded(weight, context.casts[into.weight], bias, None)
    return up, Folded(out_weight, context.casts[bank.out.weight], out_bias, None)


def attend_bank(bank: Any, normed: Tensor, dispatch: Dispatch, context: PassContext) -> Tensor:
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


def attention_bank_refusal(bank: Any) -> str | None:
    """Why kernels do not serve a bank of attentions."""
    dim = bank.head_dim
    return first(
        unless(kind_of(bank) is SoftmaxAttention, f"{type(bank).__name__} has no kernels for a bank of attentions"),
        unless(bank.out is not None, "its kernels need out_projection"),
        unless(bank.kv_heads == bank.heads, "its kernels need as many kv_heads as heads"),
        unless(dim >= 16 and dim & (dim - 1) == 0, "its kernels need a head_dim that is a power of two from 16 on"),
    )


def attention_bank_sums(bank: Any) -> SharedSums:
    """The column sums of the biases of queries, keys and values."""
    return SharedSums((bank.heads, bank.qkv.weight.shape), bank.qkv)


def attention_bank_stack(bank: Any, rows: int, dtype: torch.dtype) -> SharedStack:
    """The slot of queries, keys and values of a whole bank, which one product computes."""
    members, inputs, outputs = bank.qkv.weight.shape
    make = partial(make_dense_stack, rows, inputs, members * outputs, dtype, True)
    return SharedStack(("bank", bank.qkv.weight.shape), (bank.qkv,), rows, make)


def grouped_stack(
    linear: Any, top_k: int, tokens: int, dtype: torch.dtype, gathered: Gathered | None = None, summed: bool = False
) -> SharedStack:
    """The slot of the matrices of a bank; `summed`: the kernel that computes the gradient also sums it for the bias."""
    experts, width, outputs = shape = tuple(linear.weight.shape)
    biased, rows = linear.bias is not None and not summed, row_bound(tokens, top_k, experts, TILE)

    def make(banks: int) -> list[GradientStack]:
        inputs = StackedRows(banks, tokens if gathered else rows, width, dtype)
        return [GroupedGradientStack(experts, inputs, StackedRows(banks, rows, outputs, dtype), biased, gathered)]

    return SharedStack((shape, biased, top_k, gathered), (linear,), rows, make, grouped=True)
