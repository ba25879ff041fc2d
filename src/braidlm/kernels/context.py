"""What the layers of one pass share, and what a layer leaves for the next one to add to the stream.

Rows of the batch are kept flat, [batch * time, width].
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.dropout import NO_DROPOUT, DropoutUse
from braidlm.kernels.ops.fold import Folded, Folding
from braidlm.kernels.ops.linear import Casts, Linear
from braidlm.kernels.ops.norm import AddDelta
from braidlm.kernels.routed.combine import UncombinedRows, UncombinedSum
from braidlm.kernels.side_stream import SideStream, current_side_stream, on_side
from braidlm.model.routing.routing import Routing, Routings

Rotation = tuple[Tensor, Tensor, Tensor | None]
"""Cosine and sine, [time, dim], and [batch * time] which of their rows a token has, if not that of its place."""


@dataclass
class PendingAdd:
    """What a layer adds to the stream, before its bias is added and dropout applied: the next norm does all three."""

    delta: Tensor
    bias: Tensor | None = None
    slot: GradientSlot | None = None
    """The slot of the layer that computed delta."""
    dropout: DropoutUse = NO_DROPOUT
    uncombined: UncombinedSum | None = None
    """What delta is computed from, where the next norm may do that too."""

    @property
    def fields(self) -> tuple[Tensor, Tensor | None, GradientSlot | None, DropoutUse]:
        """All but `uncombined`, with a delta that is computed."""
        if self.uncombined is not None:
            self.uncombined.combine_into(self.delta)
        return self.delta, self.bias, self.slot, self.dropout


Stream = Tensor | UncombinedRows
Sublayer = tuple[Tensor, PendingAdd, Routings]
"""The stream with what was pending, what a sublayer adds to it, and routings."""
LayerOutput = tuple[Stream, PendingAdd | None, Routings]
"""The stream after a layer, what the layer leaves for the next one to add, and routings."""
NO_ADD = (None, None, None, NO_DROPOUT)
"""The fields where nothing is pending."""


@dataclass
class PassContext:
    """What every layer needs to know of one pass."""

    batch: int
    time: int
    dtype: torch.dtype
    """The type of the stream and of the products."""
    device: torch.device
    masks: dict[int | None, Tensor | None]
    rotations: dict[int, Rotation | None]
    """By head size."""
    interleaved: bool
    """Whether neighbouring channels are rotated together, or channels half a head apart."""
    casts: Casts
    """Copies of parameters in the type of the products."""
    parts: set[nn.Module]
    """The parts that kernels serve."""
    plain: Any
    """The `PlainForward` of the others."""
    slots: dict[nn.Module, GradientSlot]
    sums: dict[nn.Module, ColumnSums]
    foldings: list[Folding]
    """Weights with their norm folded in, computed on the side stream and not known to autograd yet."""
    folded: dict[nn.Module, Folded] = field(default_factory=dict)
    """The foldings that autograd knows."""
    seeds: dict[nn.Module, Tensor] = field(default_factory=dict)
    """For dropout inside kernels, one for each use of a part: the same if a layer is recomputed."""
    late_casts: Callable[[], Casts] | None = None
    """Casts what is read after all layers; called once the layers' own casts are done."""
    side: SideStream | None = field(default_factory=current_side_stream, init=False)

    def unflattened(self, rows: Tensor) -> Tensor:
        """Rows as [batch, time, width]."""
        return rows.view(self.batch, self.time, -1)

    def autocast(self) -> torch.autocast:
        """The precision of parts that run their plain forward."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def linear(self, rows: Tensor, layer: nn.Linear, with_bias: bool = False) -> Tensor:
        """The layer's product, with its bias on request (then the caller also computes the gradient of the bias)."""
        bias = self.casts[layer.bias] if with_bias and layer.bias is not None else None
        return Linear.apply(rows, layer.weight, self.casts[layer.weight], bias, self.slots.get(layer))

    def routing(
        self, router: Any, scores: Tensor, probabilities: Tensor, chosen: Tensor, weights: Tensor, new: Any = None
    ) -> Routing:
        """The record of a router's choice for the rows of the batch."""
        return Routing(
            router.address,
            router.choices,
            self.unflattened(probabilities),
            self.unflattened(chosen),
            self.unflattened(weights),
            dict(router.config.losses),
            self.unflattened(scores),
            new,
        )

    def synchronize(self) -> None:
        """Wait for what the side stream computes for the layers after the first."""
        if self.side is not None:
            self.side.synchronize()
        while self.foldings:  # attached here, so that their backward runs before that of the layers before
            self.folded |= self.foldings.pop().attach()
        if self.late_casts is not None:
            with on_side(self.side):
                self.casts |= self.late_casts()
            self.late_casts = None

    def seed(self, part: nn.Module, probability: float, use: int = 0) -> Tensor | None:
        """The seed of one use of a part's dropout, if there is dropout."""
        return self.seeds[part][use] if probability else None

    def dropout(self, part: Any, use: int = 0) -> DropoutUse:
        """One use of a part's own dropout."""
        return DropoutUse(part.drop.probability, self.seed(part, part.drop.probability, use))

    def sums_of(self, part: nn.Module) -> ColumnSums:
        """Where the gradients of a part's vectors are summed."""
        return self.sums.get(part) or ColumnSums(1)


def combined(stream: Stream) -> Tensor:
    """The stream as a tensor."""
    return stream if isinstance(stream, Tensor) else stream.combined()


def add_pending(stream: Tensor, pending: PendingAdd | None) -> Tensor:
    """The stream with the pending addition."""
    if pending is None:
        return stream
    delta, bias, slot, dropout = pending.fields
    return AddDelta.apply(stream, delta, bias, dropout, slot)
