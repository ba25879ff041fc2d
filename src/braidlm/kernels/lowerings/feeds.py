"""Feed-forward parts: one layer, an activation that may be gated, and a second layer; or experts of such parts."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.kernels.context import PassContext, PendingAdd, Sublayer
from braidlm.kernels.gradient_stacks import GradientStack, StackedRows
from braidlm.kernels.lowerings import experts
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
from braidlm.kernels.ops.activation import Activation
from braidlm.kernels.ops.dropout import DropoutUse
from braidlm.kernels.routed.combine import UncombinedSum
from braidlm.kernels.routed.grouped.layers import CombinedFeed, FeedConfig
from braidlm.kernels.routed.grouped.weights import GroupedGradientStack
from braidlm.kernels.routed.permutation import TILE, row_bound
from braidlm.model.feed.feeds import GEGLU, MLP, RoutedFeed, SwiGLU


@lowers(SwiGLU)
class SwiGLULowering(SublayerLowering):
    """A feed-forward part without experts, or a bank of them; those of other parts say what differs."""

    honours = {"hidden", "bias"}
    has_seeds = True
    gated = True

    def first_linear(self, feed: Any) -> Any:
        """The layer that the part begins with."""
        return feed.gate_up

    def activation(self, feed: Any) -> str:
        """The name of its activation."""
        return "silu"

    def inner_dropout(self, feed: Any, context: PassContext) -> DropoutUse:
        """The dropout of its activation."""
        return context.dropout(feed)

    def reads(self, part: Any) -> list[Tensor | None]:
        return [self.first_linear(part).weight, part.out.weight]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        first, out = self.first_linear(part), part.out
        return [dense_stack("first", first, rows, dtype, True), dense_stack("out", out, rows, dtype, True)]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        return lowering_of(norm).sums(norm) + self.bias_sums(part)

    def bias_sums(self, part: Any) -> list[SharedSums]:
        """The column sums of the first layer's bias."""
        into = self.first_linear(part)
        return [] if into.bias is None else [SharedSums((type(part), into.weight.shape), into, by_blocks=True)]

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        stream, normed = add_norm(stream, pending, norm, self.first_linear(part), context)
        return stream, self.feed_forward(part, normed, context), ()

    def feed_forward(self, part: Any, rows: Tensor, context: PassContext) -> PendingAdd:
        """The addition of a part that reads normalised rows."""
        into, slot = self.first_linear(part), context.slots.get(part.out)
        inner = context.linear(rows, into)
        outer = Activation.apply(
            inner, into.bias, self.activation(part), self.gated, context.sums_of(into), context.slots.get(into), slot,
            self.inner_dropout(part, context),
        )  # fmt: skip
        return PendingAdd(context.linear(outer, part.out), part.out.bias, slot)


@lowers(GEGLU)
class GEGLULowering(SwiGLULowering):
    def activation(self, feed: GEGLU) -> str:
        return "gelu"


@lowers(MLP)
class MLPLowering(SwiGLULowering):
    honours = {"hidden", "activation", "bias"}
    gated = False

    def first_linear(self, feed: MLP) -> Any:
        return feed.up

    def activation(self, feed: MLP) -> str:
        return feed.config.activation


def first_linear(feed: nn.Module) -> Any:
    """The layer that a feed-forward part begins with."""
    return lowering_of(feed).first_linear(feed)


@lowers(RoutedFeed)
class RoutedFeedLowering(experts.RoutedLowering):
    """Feed-forward experts, with a shared part beside them or without."""

    honours = experts.EXPERTS | {"experts.shared", "hidden", "activation", "bias"}

    def reject(self, part: Any, body: Any) -> str | None:
        return super().reject(part, body) or option_refusal(part.bank, is_bank=True)

    def reads(self, part: Any) -> list[Tensor | None]:
        feeds = [feed for feed in (part.bank, part.shared) if feed is not None]
        return [parameter for feed in feeds for parameter in lowering_of(feed).reads(feed)]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        shared = [] if part.shared is None else lowering_of(part.shared).bias_sums(part.shared)
        return [*super().sums(part, norm), *shared]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        """The experts, the part beside them and a router with many choices read the same rows, and the gradient of the
        sum of experts and shared part is that of either."""
        if part.drop_output.probability:  # with dropout, rows have gradients of their own
            return []
        bank, shared, tokens, top_k = part.bank, part.shared, rows, part.router.config.top_k
        into, scored = first_linear(bank), part.router.inner is None and not experts.has_few_choices(part.router)
        (members, width, inner), hidden = into.weight.shape, bank.out.weight.shape[1]
        biased, sorted_rows = bank.out.bias is not None, row_bound(tokens, top_k, members, TILE)
        matrices = [into, bank.out]
        if scored:  # by the rows themselves
            matrices.append(part.router.scores)
        if shared is not None:
            matrices += [first_linear(shared), shared.out]

        def make(parts: int) -> list[GradientStack]:
            stacked = partial(StackedRows, parts, dtype=dtype)
            inputs, gradients = stacked(tokens, width), stacked(tokens, width)
            stacks: list[GradientStack] = [
                GroupedGradientStack(members, inputs, stacked(sorted_rows, inner), gathered="inputs"),
                GroupedGradientStack(members, stacked(sorted_rows, hidden), gradients, biased, "gradients"),
            ]
            if scored:
                stacks.append(GradientStack(inputs, stacked(tokens, members)))
            if shared is not None:
                stacks.append(GradientStack(inputs, stacked(tokens, len(first_linear(shared).weight))))
                stacks.append(GradientStack(stacked(tokens, shared.out.weight.shape[1]), gradients))
            return stacks

        shapes = [first_linear(feed).weight.shape for feed in (bank, shared) if feed is not None]
        key = (top_k, scored, type(bank), biased, *shapes)
        return [SharedStack(key, tuple(matrices), sorted_rows, make, grouped=True)]

    def run(self, stream: Tensor, pending: PendingAdd | None, norm: Any, part: Any, context: PassContext) -> Sublayer:
        bank, lowering, out_slot = part.bank, lowering_of(part.bank), context.slots.get(part.bank.out)
        reader, on_side = lowering.first_linear(bank), part.shared is not None
        stream, normed, dispatch = experts.add_norm_route(
            stream, pending, norm, part.router, reader, context, permute_on_side=on_side
        )
        shared = None if part.shared is None else lowering_of(part.shared).feed_forward(part.shared, normed, context)
        dispatch.wait()
        bias = None if shared is None else shared.bias
        if part.drop_output.probability:  # of each row, before the sum
            delta = dispatch.combine(part.drop_output(experts.grouped_feed(bank, normed, dispatch, context)))
            return stream, PendingAdd(delta if shared is None else delta + shared.delta, bias), (dispatch.routing,)
        up, out = experts.feed_matrices(bank, context)
        # Where gradients have slots no layer is computed again, which would need the sum without the next norm.
        uncombined = None if out_slot is None else UncombinedSum()
        config = FeedConfig(
            dispatch.permutation, lowering.activation(bank), lowering.gated, up_slot=context.slots.get(reader),
            inner_dropout=lowering.inner_dropout(bank, context), out_slot=out_slot, deferred=dispatch.deferred,
            uncombined=uncombined,
        )  # fmt: skip
        delta = CombinedFeed.apply(
            normed, up.weight, up.cast, up.bias, out.weight, out.cast, out.bias, dispatch.weights,
            None if shared is None else shared.delta, config,
        )  # fmt: skip
        return stream, PendingAdd(delta, bias, out_slot, uncombined=uncombined), (dispatch.routing,)
