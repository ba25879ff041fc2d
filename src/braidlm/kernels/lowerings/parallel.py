"""Layers of routed blocks of one shape: the chosen blocks of each token, in sorted rows."""

from typing import Any

import torch
from torch import Tensor

from braidlm.kernels.context import PassContext, PendingAdd, Stream
from braidlm.kernels.lowerings.banks import (
    Base,
    attend_bank,
    attention_bank_refusal,
    attention_bank_stack,
    attention_bank_sums,
    grouped_feed,
    grouped_linear,
    grouped_stack,
)
from braidlm.kernels.lowerings.feeds import first_linear
from braidlm.kernels.lowerings.lowering import (
    Fold,
    LayerLowering,
    Lowering,
    SharedStack,
    SharedSums,
    bank_refusal,
    first,
    lowers,
    partly_frozen,
    refusal,
    unless,
)
from braidlm.kernels.lowerings.norms import form_of
from braidlm.kernels.lowerings.positions import rotation_refusal
from braidlm.kernels.lowerings.router import ROUTER, add_norm_route, has_few_choices, router_refusal, router_sums
from braidlm.kernels.ops.dropout import DropoutUse
from braidlm.kernels.ops.fold import Bank
from braidlm.kernels.routed.combine import UncombinedRows
from braidlm.kernels.routed.project_rows import MAX_WIDTH, ProjectAddNormRows
from braidlm.kernels.routed.rows import AddNormRows, Norm
from braidlm.kernels.side_stream import DeferredGradient
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.paths.routed_join import Routed
from braidlm.model.routing.routing import Routings


@lowers(Routed)
class RoutedJoinLowering(Lowering):
    honours = ROUTER

    def reject(self, part: Any, body: Any) -> str | None:
        return router_refusal(part.router, body)


@lowers(ParallelLayer)
class ParallelLowering(LayerLowering):
    honours = {"paths", "layers", "join", "to", "share", "stacked"}

    def reject(self, part: Any, body: Any) -> str | None:
        """Kernels serve routed blocks of one shape at the stream's own width."""
        reason = refusal(part.join, body)
        if reason is not None:
            return f"join: {reason}"
        if part.stack is None or part.enter is not None or len(part.join.leave) or part.join.out is not None:
            return "its paths are not of one shape at the stream's width"
        if len(part.stack) != 1:
            return "its paths have more than one block in a layer"
        block = part.stack[0]
        return first(
            partly_frozen(part),
            bank_refusal(block.attention_norm),
            unless(form_of(block.attention_norm) is not None, "its norm cannot be folded into the product behind it"),
            bank_refusal(block.attention),
            bank_refusal(block.feed),
            attention_bank_refusal(block.attention),
            rotation_refusal(body, "no kernel rotates the queries of routed tokens"),
        )

    def reads(self, part: Any) -> list[Tensor | None]:
        return [part.stack[0].attention.out.weight, part.stack[0].feed.out.weight]

    def folds(self, part: Any) -> list[Fold]:
        block = part.stack[0]
        qkv, into = block.attention.qkv, first_linear(block.feed)
        return [
            Fold(qkv, _folded_bank(qkv, block.attention_norm), concatenated=True),
            Fold(into, _folded_bank(into, block.feed_norm), concatenated=False),
        ]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        block, top_k = part.stack[0], part.join.router.config.top_k
        return [
            attention_bank_stack(block.attention, rows, dtype),
            grouped_stack(block.attention.out, top_k, rows, dtype),
            grouped_stack(first_linear(block.feed), top_k, rows, dtype, summed=True),
            grouped_stack(block.feed.out, top_k, rows, dtype),
        ]

    def sums(self, part: Any, norm: Any) -> list[SharedSums]:
        router = part.join.router  # the norm is folded in, so that only the router's gradients are summed
        return [
            router_sums(router, has_few_choices(router), ParallelLayer),
            attention_bank_sums(part.stack[0].attention),
        ]

    def run(
        self, stream: Stream, pending: PendingAdd | None, layer: Any, context: PassContext
    ) -> tuple[UncombinedRows, None, Routings]:
        block, router = layer.stack[0], layer.join.router
        # The norm's kernel reads the stream's gradient itself where it also routes, for few choices.
        deferred = DeferredGradient() if has_few_choices(router) else None
        stream, normed, dispatch = add_norm_route(
            stream, pending, block.attention_norm, router, block.attention.qkv, context, reads_normed=False,
            folded=True, deferred=deferred, permute_on_side=True,
        )  # fmt: skip
        bank, probability, form = block.attention, block.drop.probability, form_of(block.feed_norm)
        attended = attend_bank(bank, normed, dispatch, context)
        assert form is not None
        norm = Norm(
            form.eps, form.centred, probability, context.seed(block, probability),
            context.slots.get(first_linear(block.feed)), context.slots.get(bank.out), deferred,
        )  # fmt: skip
        if stream.shape[1] <= MAX_WIDTH:
            cast = context.casts[bank.out.weight]
            rows, normed = ProjectAddNormRows.apply(
                attended, bank.out.weight, cast, bank.out.bias, stream, dispatch.permutation, norm
            )
        else:
            delta = grouped_linear(bank.out, attended, dispatch, context, gather=False)
            rows, normed = AddNormRows.apply(stream, delta, dispatch.permutation, norm)
        base = Base(rows, DropoutUse(probability, context.seed(block, probability, 1)))
        fed = grouped_feed(block.feed, normed, dispatch, context, base)
        slot = None if probability else context.slots.get(block.feed.out)
        return UncombinedRows(fed, dispatch.weights, dispatch.permutation, slot), None, (dispatch.routing,)


def _folded_bank(linear: Any, norm: Any) -> Bank:
    form = form_of(norm)
    assert form is not None
    return Bank(linear.weight, linear.bias, form.weight, form.bias)
