"""The parts of a plain block in training on a GPU, by kernels written for it.

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

from braidlm.kernels.ops.linear import Linear, Narrow
from braidlm.kernels.side_stream import Aside, beside
from braidlm.kernels.weight_stacks import Place
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
    from braidlm.kernels.routed.grouped_stacks import GroupedPlace

Turn = tuple[Tensor, Tensor]
FEEDS = (MLP, SwiGLU, GEGLU)
LONGEST_ATTENDED = 512
"""Tokens up to which our own attention is the faster one (on an H200)."""


@dataclass
class Written:
    """What a layer adds to the stream: its bias, if it has one, is still to be added, and then some of it dropped."""

    delta: Tensor
    bias: Tensor | None = None
    place: Place | None = None
    dropout: float = 0.0
    seed: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Place | None, float, Tensor | None]:
        return self.delta, self.bias, self.place, self.dropout, self.seed


NOTHING = (None, None, None, 0.0, None)
"""The parts where nothing was written."""


@dataclass
class Pass:
    """What every block needs to know of one pass."""

    batch: int
    time: int
    masks: dict[int | None, Tensor | None]
    turns: dict[int, Turn | None]
    neighbours: bool
    narrow: Narrow
    places: dict[nn.Module, Place]
    sums: dict[nn.Module, Sums]
    aside: Aside | None
    foldings: list[Folding] = field(default_factory=list)
    """Of the layers that read a norm of their own, or are read side by side; made aside."""
    folded: dict[nn.Module, Folded] = field(default_factory=dict)
    """The same where they are known to autograd."""
    grouped: dict[nn.Module, GroupedPlace] = field(default_factory=dict)
    """Places of the matrices of banks."""
    seeds: dict[nn.Module, Tensor] = field(default_factory=dict)
    """For dropout inside kernels, as many for each part as it has uses for: the same if a layer is computed again."""

    late: Callable[[], Narrow] | None = None
    """Makes the copies that nobody reads before the end: once those of the layers are there."""

    def linear(self, rows: Tensor, layer: nn.Linear, with_bias: bool = False) -> Tensor:
        """The layer's product, with its bias if asked for (then the caller also gives the bias its gradient)."""
        bias = self.narrow[layer.bias] if with_bias and layer.bias is not None else None
        place = self.places.get(layer)
        return Linear.apply(rows, layer.weight, self.narrow[layer.weight], bias, self.aside, place)

    def join(self) -> None:
        """Wait for what was made aside for the layers after the first."""
        if self.aside is not None:
            self.aside.join()
        while self.foldings:  # now, so that backward it is their turn before that of the layers before
            self.folded |= self.foldings.pop().attached()
        if self.late is not None:
            with beside(self.aside):
                self.narrow |= self.late()
            self.late = None

    def seed(self, part: nn.Module, probability: float, use: int = 0) -> Tensor | None:
        """The part's own for this use, if anything is to be dropped."""
        return self.seeds[part][use] if probability else None

    def sums_of(self, part: nn.Module) -> Sums:
        """Where the gradients of a part's vectors are summed."""
        return self.sums.get(part) or Sums(1, self.aside)


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


def settled(stream: Tensor, written: Written | None, way: Pass) -> Tensor:
    """The stream with what was written."""
    if written is None:
        return stream
    delta, bias, place, dropout, seed = written.parts
    summed: Tensor = AddDelta.apply(stream, delta, bias, way.aside, dropout, seed, place)
    return summed


def dropped(block: Block, written: Written, use: int, way: Pass) -> Written:
    """What a block's part adds, dropped by chance where it is added; `use` counts the block's parts."""
    if type(block.drop) is Dropout:
        probability = block.drop.probability
        return replace(written, dropout=probability, seed=way.seed(block, probability, use))
    delta, bias = written.delta, written.bias
    return Written(block.drop(delta if bias is None else delta + bias.to(delta.dtype)))


def add_norm(
    stream: Tensor,
    written: Written | None,
    norm: LayerNorm | RMSNorm,
    reader: nn.Module | None,
    way: Pass,
    folded: bool = False,
) -> tuple[Tensor, Tensor]:
    """The stream with what was written, and the same normalised for `reader`, without the norm's own vectors where they
    are folded into what reads it.
    """
    centred = isinstance(norm, LayerNorm)
    vectors = (None, None) if folded else (norm.weight, norm.bias if isinstance(norm, LayerNorm) else None)
    delta, bias, place, dropout, seed = NOTHING if written is None else written.parts
    normed_place = None if reader is None else way.places.get(reader) or way.grouped.get(reader)
    return AddNorm.apply(
        stream, delta, bias, *vectors, norm.eps, centred, way.sums_of(norm), normed_place, place, dropout, seed
    )  # fmt: skip


def attend(attention: Any, rows: Tensor, way: Pass) -> Written:
    qkv = way.linear(rows, attention.qkv, with_bias=True)
    merged = (_attend_ourselves if _pays_to_attend(attention, way) else _attend_by_torch)(attention, qkv, way)
    if attention.out is None:
        return Written(merged)
    return Written(way.linear(merged, attention.out), attention.out.bias)


def _pays_to_attend(attention: Any, way: Pass) -> bool:
    """Whether our own kernels are sooner done than the library's, which wants queries and keys apart."""
    if way.time > LONGEST_ATTENDED or way.turns[attention.head_dim] is not None:
        return False
    dim: int = attention.head_dim
    return attention.kv_heads == attention.heads and dim >= 16 and dim & (dim - 1) == 0


def _attend_ourselves(attention: Any, qkv: Tensor, way: Pass) -> Tensor:
    everybody: Queries = everyone(way.batch, way.time, qkv.device)
    probability, scale = attention.drop.probability, 1 / math.sqrt(attention.head_dim)
    mixed: Tensor = AttendRouted.apply(
        qkv.view(len(qkv), 1, 3, attention.heads, attention.head_dim), *everybody, scale, probability,
        way.seed(attention, probability), attention.window, None, attention.qkv.bias, way.sums_of(attention.qkv),
        way.places.get(attention.qkv),
    )  # fmt: skip
    return mixed


def _attend_by_torch(attention: Any, qkv: Tensor, way: Pass) -> Tensor:
    query, key, value = SplitHeads.apply(
        qkv.view(way.batch, way.time, -1, attention.head_dim),
        attention.qkv.bias,
        way.turns[attention.head_dim],
        way.neighbours,
        attention.kv_heads,
        way.sums_of(attention.qkv),
        way.places.get(attention.qkv),
    )
    mask = way.masks[attention.window]
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=attention.drop.probability,
        is_causal=mask is None,
        enable_gqa=attention.kv_heads != attention.heads,
    )
    return mixed.transpose(1, 2).reshape(way.batch * way.time, -1)


def feed_forward(feed: Any, rows: Tensor, way: Pass) -> Written:
    into = into_feed(feed)
    kind = feed.kind if isinstance(feed, MLP) else "silu" if isinstance(feed, SwiGLU) else "gelu"
    inner = way.linear(rows, into)
    gated = not isinstance(feed, MLP)
    place = way.places.get(feed.out)
    outer = Activation.apply(inner, into.bias, kind, gated, way.sums_of(into), way.places.get(into), place)
    return Written(way.linear(outer, feed.out), feed.out.bias, place)
