"""Feed-forward parts: one layer, an activation that may be gated, and a second layer."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.kernels.context import PassContext, PendingAdd, Sublayer
from braidlm.kernels.gradient_stacks import GradientStack, StackedRows
from braidlm.kernels.lowerings.lowering import SharedStack, SharedSums, SublayerLowering, lowering_of, lowers
from braidlm.kernels.lowerings.norms import add_norm
from braidlm.kernels.ops.activation import Activation
from braidlm.kernels.ops.dropout import DropoutUse
from braidlm.model.feed.feeds import GEGLU, MLP, SwiGLU


class FeedLowering(SublayerLowering):
    """A feed-forward part without experts, or a bank of them."""

    has_seeds = True
    gated = True

    def first_linear(self, feed: Any) -> Any:
        """The layer that the part begins with."""
        return feed.gate_up

    def activation(self, feed: Any) -> str:
        """The name of its activation."""
        raise NotImplementedError

    def inner_dropout(self, feed: Any, context: PassContext) -> DropoutUse:
        """The dropout of its activation."""
        return DropoutUse(feed.drop.probability, context.seed(feed, feed.drop.probability))

    def reads(self, part: Any) -> list[Tensor | None]:
        return [self.first_linear(part).weight, part.out.weight]

    def stacks(self, part: Any, rows: int, dtype: torch.dtype) -> list[SharedStack]:
        into = self.first_linear(part)
        return [dense_stack("first", into, rows, dtype), dense_stack("out", part.out, rows, dtype)]

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


@lowers(MLP)
class MLPLowering(FeedLowering):
    honours = {"hidden", "activation", "bias"}
    gated = False

    def first_linear(self, feed: MLP) -> Any:
        return feed.up

    def activation(self, feed: MLP) -> str:
        return feed.config.activation


@lowers(SwiGLU)
class SwiGLULowering(FeedLowering):
    honours = {"hidden", "bias"}

    def activation(self, feed: SwiGLU) -> str:
        return "silu"


@lowers(GEGLU)
class GEGLULowering(FeedLowering):
    honours = {"hidden", "bias"}

    def activation(self, feed: GEGLU) -> str:
        return "gelu"


def first_linear(feed: nn.Module) -> Any:
    """The layer that a feed-forward part begins with."""
    return lowering_of(feed).first_linear(feed)


def dense_stack(kind: str, linear: Any, rows: int, dtype: torch.dtype) -> SharedStack:
    """The slot of a layer [out, in] in a block."""
    outputs, inputs = linear.weight.shape
    make = partial(make_dense_stack, rows, inputs, outputs, dtype, False)
    return SharedStack((kind, linear.weight.shape), (linear,), rows, make, by_blocks=True)


def make_dense_stack(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, transposed: bool, layers: int
) -> list[GradientStack]:
    """The stack of so many layers of one shape."""
    read, gradients = (StackedRows(layers, rows, width, dtype) for width in (inputs, outputs))
    return [GradientStack(read, gradients, transposed)]
