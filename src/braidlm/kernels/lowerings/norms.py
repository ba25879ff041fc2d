"""Norms. Kernels that also add, route or project compute a norm that has a form; any other is computed by itself."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from braidlm.kernels.context import NO_ADD, PassContext, PendingAdd, add_pending
from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.lowerings.lowering import Lowering, SharedSums, lowering_of, lowers
from braidlm.kernels.ops.norm import AddNorm, NormConfig
from braidlm.kernels.routed.combine import CombineAddNorm
from braidlm.model.norms import LayerNorm, RMSNorm


@dataclass(frozen=True)
class NormForm:
    """Rows, minus their mean if `centred`, over the root of their mean square plus `eps`, times `weight`, plus `bias`.

    Every fused kernel can compute such a norm.
    """

    eps: float
    centred: bool
    weight: Tensor | None = None
    bias: Tensor | None = None

    def without_vectors(self, folded: bool = True) -> "NormForm":
        """The form where weight and bias are folded into the matrices behind the norm."""
        return replace(self, weight=None, bias=None) if folded else self


class NormLowering(Lowering):
    """A norm says its form, or computes rows by itself."""

    def form(self, norm: Any) -> NormForm | None:
        """The norm as fused kernels compute it; None for a norm that is something else."""
        return None

    def normalise(self, norm: Any, rows: Tensor) -> Tensor:
        """Rows [rows, width] after a norm without a form, in the rows' type and with a gradient."""
        raise NotImplementedError

    def sums(self, part: Any, norm: Any = None) -> list[SharedSums]:
        form = self.form(part)
        if form is None or form.weight is None:
            return []
        return [SharedSums((type(part), form.weight.shape), part, by_blocks=True)]


@lowers(LayerNorm)
class LayerNormLowering(NormLowering):
    honours = {"eps", "bias"}

    def form(self, norm: LayerNorm) -> NormForm:
        return NormForm(norm.eps, True, norm.weight, norm.bias)


@lowers(RMSNorm)
class RMSNormLowering(NormLowering):
    honours = {"eps"}

    def form(self, norm: RMSNorm) -> NormForm:
        assert norm.eps is not None
        return NormForm(norm.eps, False, norm.weight)


def form_of(norm: nn.Module) -> NormForm | None:
    """The form of a norm, if kernels serve it and it has one."""
    lowering = lowering_of(norm)
    return None if lowering is None else lowering.form(norm)


def add_norm(
    stream: Tensor,
    pending: PendingAdd | None,
    norm: nn.Module,
    reader: nn.Module | None,
    context: PassContext,
    folded: bool = False,
) -> tuple[Tensor, Tensor]:
    """The stream with the pending addition, and that normalised for the layer `reader`; without the norm's own vectors
    where these are `folded` into the reader's weights.
    """
    slot, lowering = None if reader is None else context.slots.get(reader), lowering_of(norm)
    form = lowering.form(norm)
    if form is None:
        stream = add_pending(stream, pending)
        normed = lowering.normalise(norm, stream)
        return stream, normed if slot is None else _IntoSlot.apply(normed, slot)
    form = form.without_vectors(folded)
    configured = partial(NormConfig, form.eps, form.centred, context.sums_of(norm), read_slot=slot)
    vectors = form.weight, form.bias
    if pending is not None and pending.uncombined is not None:
        config = configured(delta_slot=pending.slot, dropout=pending.dropout)
        return CombineAddNorm.apply(stream, pending.delta, pending.bias, *vectors, config, pending.uncombined)
    delta, bias, delta_slot, dropout = NO_ADD if pending is None else pending.fields
    return AddNorm.apply(stream, delta, bias, *vectors, configured(delta_slot=delta_slot, dropout=dropout))


class _IntoSlot(torch.autograd.Function):
    """rows -> the same rows, where the product that reads them expects its input."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slot: GradientSlot) -> Tensor:
        written = slot.input
        written.copy_(rows)
        return written

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
