"""Feed-forward experts, with a shared part beside them or without."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, Sublayer
from braidlm.kernels.gradient_stacks import GradientStack, StackedRows
from braidlm.kernels.lowerings.banks import feed_matrices, grouped_feed
from braidlm.kernels.lowerings.feeds import first_linear
from braidlm.kernels.lowerings.lowering import (
    SharedStack,
    SharedSums,
    SublayerLowering,
    bank_refusal,
    first,
    lowering_of,
    lowers,
)
from braidlm.kernels.lowerings.router import EXPERTS, add_norm_route, has_few_choices, routed_sums, router_refusal
from braidlm.kernels.routed.combine_norm import UncombinedSum
from braidlm.kernels.routed.combined_feed import CombinedFeed
from braidlm.kernels.routed.gradient_stacks import GroupedGradientStack
from braidlm.kernels.routed.permutation import TILE, row_bound
from braidlm.model.feed.routed import RoutedFeed


@lowers(RoutedFeed)
class RoutedFeedLowering(SublayerLowering):
    honours = EXPERTS | {"experts.shared", "hidden", "activation", "bias"}
    routed = True

    def reject(self, part: Any, body: Any) -> str | None:
        return first(router_refusal(part.router, body), bank_refusal(part.bank))

    def reads(self, part: Any) -> list[Tensor | None]:
        feeds = [feed for feed in (part.bank, part.shared) if feed is not None]
        return [parameter for feed in feeds for parameter in lowering_of(feed).reads(feed)]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        shared = [] if part.shared is None else lowering_of(part.shared).bias_sums(part.shared)
        return [*routed_sums(part.router, norm), *shared]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        """The experts, the part beside them and a router with many choices read the same rows, and the gradient of the
        sum of experts and shared part is that of either."""
        if part.drop.probability:  # with dropout, rows have gradients of their own
            return []
        bank, shared, tokens, top_k = part.bank, part.shared, rows, part.router.config.top_k
        into, scored = first_linear(bank), part.router.inner is None and not has_few_choices(part.router)
        (experts, width, inner), hidden = into.weight.shape, bank.out.weight.shape[1]
        biased, sorted_rows = bank.out.bias is not None, row_bound(tokens, top_k, experts, TILE)
        matrices = [into, bank.out]
        if scored:  # by the rows themselves
            matrices.append(part.router.scores)
        if shared is not None:
            matrices += [first_linear(shared), shared.out]

        def make(parts: int) -> list[GradientStack]:
            stacked = partial(StackedRows, parts, dtype=dtype)
            inputs, gradients = stacked(tokens, width), stacked(tokens, width)
            stacks: list[GradientStack] = [
                GroupedGradientStack(experts, inputs, stacked(sorted_rows, inner), gathered="inputs"),
                GroupedGradientStack(experts, stacked(sorted_rows, hidden), gradients, biased, "gradients"),
            ]
            if scored:
                stacks.append(GradientStack(inputs, stacked(tokens, experts)))
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
        stream, normed, dispatch = add_norm_route(
            stream, pending, norm, part.router, reader, context, reads_normed=True, permute_on_side=on_side
        )
        shared = None if part.shared is None else lowering_of(part.shared).feed_forward(part.shared, normed, context)
        dispatch.wait()
        bias = None if shared is None else shared.bias
        if part.drop.probability:  # of each row, before the sum
            delta = dispatch.combine(part.drop(grouped_feed(bank, normed, dispatch, context)))
            return stream, PendingAdd(delta if shared is None else delta + shared.delta, bias), (dispatch.routing,)
        up, out = feed_matrices(bank, context)
        # Where gradients have slots no layer is computed again, which would need the sum without the next norm.
        uncombined = None if out_slot is None else UncombinedSum()
        delta = CombinedFeed.apply(
            normed, up.weight, up.cast, up.bias, out.weight, out.cast, out.bias, dispatch.weights,
            None if shared is None else shared.delta, dispatch.permutation, lowering.activation(bank), lowering.gated,
            lowering.inner_dropout(bank, context), context.slots.get(reader), out_slot, dispatch.deferred, uncombined,
        )  # fmt: skip
        return stream, PendingAdd(delta, bias, out_slot, uncombined=uncombined), (dispatch.routing,)
