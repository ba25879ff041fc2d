"""The parts of a plain block in training on a GPU, by kernels pending for it.

Rows of the batch are kept flat, [batch * time, width].
"""

from __future__ import annotations  # one of the kernels' types is named below, and may not be there

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from braidlm.kernels.gradient_stacks import GradientSlot
from braidlm.kernels.ops.linear import Casts, Linear
from braidlm.kernels.side_stream import SideStream, current_side_stream, on_side
from braidlm.model.attention.softmax import SoftmaxAttention
from braidlm.model.block import Block
from braidlm.model.dropout import Dropout
from braidlm.model.feed.feeds import GEGLU, MLP, SwiGLU
from braidlm.model.norms import LayerNorm, RMSNorm

with contextlib.suppress(ImportError):  # without Triton the plain operations serve every device
    from braidlm.kernels.ops.activation import Activation
    from braidlm.kernels.ops.add import AddDelta
    from braidlm.kernels.ops.column_sums import Sums
    from braidlm.kernels.ops.fold import Folded, Folding
    from braidlm.kernels.ops.norm import AddNorm
    from braidlm.kernels.ops.split_heads import SplitHeads
    from braidlm.kernels.routed.attention import AttendRouted, Queries, everyone
    from braidlm.kernels.routed.gradient_stacks import GroupedGradientSlot

Turn = tuple[Tensor, Tensor]
FEEDS = (MLP, SwiGLU, GEGLU)
LONGEST_ATTENDED = 512
"""Tokens up to which our own attention is the faster one (on an H200)."""


@dataclass
class PendingAdd:
    """What a layer adds to the stream: its bias, if it has one, is still to be added, and then some of it dropped."""

    delta: Tensor
    bias: Tensor | None = None
    slot: GradientSlot | None = None
    dropout: float = 0.0
    seed: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, GradientSlot | None, float, Tensor | None]:
        return self.delta, self.bias, self.slot, self.dropout, self.seed


NO_ADD = (None, None, None, 0.0, None)
"""The parts where nothing was pending."""


@dataclass
class PassContext:
    """What every block needs to know of one pass."""

    batch: int
    time: int
    masks: dict[int | None, Tensor | None]
    turns: dict[int, Turn | None]
    interleaved: bool
    narrow: Casts
    slots: dict[nn.Module, GradientSlot]
    sums: dict[nn.Module, Sums]
    foldings: list[Folding] = field(default_factory=list)
    """Of the layers that read a norm of their own, or are read side by side; made on the side stream."""
    folded: dict[nn.Module, Folded] = field(default_factory=dict)
    """The same where they are known to autograd."""
    grouped: dict[nn.Module, GroupedGradientSlot] = field(default_factory=dict)
    """Places of the matrices of banks."""
    seeds: dict[nn.Module, Tensor] = field(default_factory=dict)
    """For dropout inside kernels, as many for each part as it has uses for: the same if a layer is computed again."""

    side: SideStream | None = field(default_factory=current_side_stream, init=False)
    late: Callable[[], Casts] | None = None
    """Makes the copies that nobody reads before the end: once those of the layers are there."""

    def linear(self, rows: Tensor, layer: nn.Linear, with_bias: bool = False) -> Tensor:
        """The layer's product, with its bias if asked for (then the caller also gives the bias its gradient)."""
        bias = self.narrow[layer.bias] if with_bias and layer.bias is not None else None
        slot = self.slots.get(layer)
        return Linear.apply(rows, layer.weight, self.narrow[layer.weight], bias, slot)

    def synchronize(self) -> None:
        """Wait for what the side stream has made for the layers after the first."""
        if self.side is not None:
            self.side.synchronize()
        while self.foldings:  # now, so that backward it is their turn before that of the layers before
            self.folded |= self.foldings.pop().attached()
        if self.late is not None:
            with on_side(self.side):
                self.narrow |= self.late()
            self.late = None

    def seed(self, part: nn.Module, probability: float, use: int = 0) -> Tensor | None:
        """The part's own for this use, if anything is to be dropped."""
        return self.seeds[part][use] if probability else None

    def sums_of(self, part: nn.Module) -> Sums:
        """Where the gradients of a part's vectors are summed."""
        return self.sums.get(part) or Sums(1)


def serves_norm(norm: nn.Module) -> bool:
    return type(norm) in (LayerNorm, RMSNorm)


def serves_attention(attention: nn.Module) -> bool:
    return type(attention) is SoftmaxAttention and attention.stack is None


def serves_feed(feed: nn.Module) -> bool:
    return type(feed) in FEEDS and getattr(feed, "beta", None) is None and isinstance(feed.out, nn.Linear)


def linears(block: Any) -> list[nn.Linear]:
    """The layers of a block that are read as they are: not those of banks."""
    attention, feed = block.attention, block.feed
    if not serves_feed(feed):
        feed = getattr(feed, "shared", None)
    found = [attention.qkv, attention.out] if serves_attention(attention) else []
    found += [] if feed is None else [into_feed(feed), feed.out]
    return [layer for layer in found if layer is not None]


def into_feed(feed: Any) -> nn.Linear:
    """The layer that a feed-forward part begins with."""
    first: nn.Linear = getattr(feed, "gate_up", None) or feed.up
    return first


def add_pending(stream: Tensor, pending: PendingAdd | None, context: PassContext) -> Tensor:
    """The stream with what was pending."""
    if pending is None:
        return stream
    delta, bias, slot, dropout, seed = pending.parts
    summed: Tensor = AddDelta.apply(stream, delta, bias, dropout, seed, slot)
    return summed


def dropped(block: Block, pending: PendingAdd, use: int, context: PassContext) -> PendingAdd:
    """What a block's part adds, dropped by chance where it is added; `use` counts the block's parts."""
    if type(block.drop) is Dropout:
        probability = block.drop.probability
        return replace(pending, dropout=probability, seed=context.seed(block, probability, use))
    delta, bias = pending.delta, pending.bias
    return PendingAdd(block.drop(delta if bias is None else delta + bias.to(delta.dtype)))


def add_norm(
    stream: Tensor,
    pending: PendingAdd | None,
    norm: LayerNorm | RMSNorm,
    reader: nn.Module | None,
    context: PassContext,
    folded: bool = False,
) -> tuple[Tensor, Tensor]:
    """The stream with what was pending, and the same normalised for `reader`, without the norm's own vectors where they
    are folded into what reads it.
    """
    centred = isinstance(norm, LayerNorm)
    vectors = (None, None) if folded else (norm.weight, norm.bias if isinstance(norm, LayerNorm) else None)
    delta, bias, slot, dropout, seed = NO_ADD if pending is None else pending.parts
    normed_slot = None if reader is None else context.slots.get(reader) or context.grouped.get(reader)
    return AddNorm.apply(
        stream, delta, bias, *vectors, norm.eps, centred, context.sums_of(norm), normed_slot, slot, dropout, seed
    )  # fmt: skip


def attend(attention: Any, rows: Tensor, context: PassContext) -> PendingAdd:
    qkv = context.linear(rows, attention.qkv, with_bias=True)
    merged = (_attend_ourselves if _pays_to_attend(attention, context) else _attend_by_torch)(attention, qkv, context)
    if attention.out is None:
        return PendingAdd(merged)
    return PendingAdd(context.linear(merged, attention.out), attention.out.bias)


def _pays_to_attend(attention: Any, context: PassContext) -> bool:
    """Whether our own kernels are sooner done than the library's, which wants queries and keys apart."""
    if context.time > LONGEST_ATTENDED or context.turns[attention.head_dim] is not None:
        return False
    dim: int = attention.head_dim
    return attention.kv_heads == attention.heads and dim >= 16 and dim & (dim - 1) == 0


def _attend_ourselves(attention: Any, qkv: Tensor, context: PassContext) -> Tensor:
    everybody: Queries = everyone(context.batch, context.time, qkv.device)
    probability, scale = attention.drop.probability, 1 / math.sqrt(attention.head_dim)
    mixed: Tensor = AttendRouted.apply(
        qkv.view(len(qkv), 1, 3, attention.heads, attention.head_dim), *everybody, scale, probability,
        context.seed(attention, probability), attention.window, None, attention.qkv.bias, context.sums_of(attention.qkv),
        context.slots.get(attention.qkv),
    )  # fmt: skip
    return mixed


def _attend_by_torch(attention: Any, qkv: Tensor, context: PassContext) -> Tensor:
    query, key, value = SplitHeads.apply(
        qkv.view(context.batch, context.time, -1, attention.head_dim),
        attention.qkv.bias,
        context.turns[attention.head_dim],
        context.interleaved,
        attention.kv_heads,
        context.sums_of(attention.qkv),
        context.slots.get(attention.qkv),
    )
    mask = context.masks[attention.window]
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=attention.drop.probability,
        is_causal=mask is None,
        enable_gqa=attention.kv_heads != attention.heads,
    )
    return mixed.transpose(1, 2).reshape(context.batch * context.time, -1)


def feed_forward(feed: Any, rows: Tensor, context: PassContext) -> PendingAdd:
    into = into_feed(feed)
    kind = feed.kind if isinstance(feed, MLP) else "silu" if isinstance(feed, SwiGLU) else "gelu"
    inner = context.linear(rows, into)
    gated = not isinstance(feed, MLP)
    slot = context.slots.get(feed.out)
    outer = Activation.apply(inner, into.bias, kind, gated, context.sums_of(into), context.slots.get(into), slot)
    return PendingAdd(context.linear(outer, feed.out), feed.out.bias, slot)
