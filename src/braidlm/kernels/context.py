"""What the layers of one pass share, and what a layer leaves for the next one to add to the stream.

Rows of the batch are kept flat, [batch * time, width].
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.add import AddDelta
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.fold import Folded, Folding
from braidlm.kernels.ops.linear import Casts, Linear
from braidlm.kernels.ops.norm import AddNorm
from braidlm.kernels.routed.combine_norm import CombineAddNorm, UncombinedSum
from braidlm.kernels.side_stream import SideStream, current_side_stream, on_side
from braidlm.model.block import Block
from braidlm.model.norms import LayerNorm

Rotation = tuple[Tensor, Tensor, Tensor | None]
"""Cosine and sine, [time, dim], and [batch * time] which of their rows a token has, if not that of its place."""


@dataclass
class PendingAdd:
    """What a layer adds to the stream, before its bias is added and dropout applied: the next norm does all three."""

    delta: Tensor
    bias: Tensor | None = None
    slot: GradientSlot | None = None
    """Of the layer that computed delta."""
    dropout: float = 0.0
    seed: Tensor | None = None
    uncombined: UncombinedSum | None = None
    """What delta is computed from, where the next norm may do that too."""

    @property
    def fields(self) -> tuple[Tensor, Tensor | None, GradientSlot | None, float, Tensor | None]:
        """All but `uncombined`, with a delta that is computed."""
        if self.uncombined is not None:
            self.uncombined.combine_into(self.delta)
        return self.delta, self.bias, self.slot, self.dropout, self.seed


NO_ADD = (None, None, None, 0.0, None)
"""The fields where nothing is pending."""


@dataclass
class PassContext:
    """What every layer needs to know of one pass."""

    batch: int
    time: int
    dtype: torch.dtype
    """Of the stream and of the products."""
    device: torch.device
    masks: dict[int | None, Tensor | None]
    rotations: dict[int, Rotation | None]
    """By head size."""
    interleaved: bool
    """Whether neighbouring channels are rotated together, or channels half a head apart."""
    casts: Casts
    """Copies of parameters in the type of the products."""
    slots: dict[nn.Module, GradientSlot]
    sums: dict[nn.Module, ColumnSums]
    foldings: list[Folding]
    """Weights with their norm folded in, computed on the side stream and not known to autograd yet."""
    folded: dict[nn.Module, Folded] = field(default_factory=dict)
    """The same once they are known to autograd."""
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

    def sums_of(self, part: nn.Module) -> ColumnSums:
        """Where the gradients of a part's vectors are summed."""
        return self.sums.get(part) or ColumnSums(1)


def add_pending(stream: Tensor, pending: PendingAdd | None) -> Tensor:
    """The stream with the pending addition."""
    if pending is None:
        return stream
    delta, bias, slot, dropout, seed = pending.fields
    return AddDelta.apply(stream, delta, bias, dropout, seed, slot)


def add_norm(
    stream: Tensor,
    pending: PendingAdd | None,
    norm: Any,
    reader: nn.Module | None,
    context: PassContext,
    folded: bool = False,
) -> tuple[Tensor, Tensor]:
    """The stream with the pending addition, and the same normalised for the layer `reader`; without the norm's own
    vectors where these are folded into the reader's weights.
    """
    centred = isinstance(norm, LayerNorm)
    vectors = (None, None) if folded else (norm.weight, norm.bias if centred else None)
    normed_slot = None if reader is None else context.slots.get(reader)
    if pending is not None and pending.uncombined is not None:
        return CombineAddNorm.apply(
            stream, pending.delta, pending.bias, *vectors, norm.eps, centred, context.sums_of(norm), normed_slot,
            pending.slot, pending.dropout, pending.seed, pending.uncombined,
        )  # fmt: skip
    delta, bias, slot, dropout, seed = NO_ADD if pending is None else pending.fields
    return AddNorm.apply(
        stream, delta, bias, *vectors, norm.eps, centred, context.sums_of(norm), normed_slot, slot, dropout, seed
    )  # fmt: skip


def with_dropout(pending: PendingAdd, block: Block, use: int, context: PassContext) -> PendingAdd:
    """The addition of a block's first or second part (`use`) with the block's dropout."""
    probability = block.drop.probability
    return replace(pending, dropout=probability, seed=context.seed(block, probability, use))
