"""The way through a model in training on a GPU, by kernels written for it: what `BraidModel.stream` computes, sooner.

Each part that is served here has its plain form in the module it belongs to, which stays the reference and serves every
other case. Rows of the batch are kept flat, [batch * time, width].
"""

from __future__ import annotations  # one of the kernels' types is named below, and may not be there

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .aside import Aside, Tied, beside
from .attention import SoftmaxAttention
from .block import Block
from .embedding import TokenEmbedding
from .feed import GEGLU, MLP, SwiGLU
from .fused_linear import Linear, Narrow, narrowed
from .norms import LayerNorm, RMSNorm
from .positions import LearnedPositions, NoPositions, RotaryPositions
from .span import make_masks
from .stages import BlockStage
from .weight_stacks import ROWS, Place, Stack

BLOCKS_SUMMED_TOGETHER = 4
"""Whose vectors' gradients are finished by one launch."""

HAS_KERNELS = False
with contextlib.suppress(ImportError):  # without Triton the plain operations serve every device
    from .fused_activation import Activation
    from .fused_embedding import Embed
    from .fused_heads import SplitHeads
    from .fused_norm import AddNorm
    from .fused_sums import Sums

    HAS_KERNELS = True

Turn = tuple[Tensor, Tensor]


@dataclass
class Written:
    """What a layer adds to the stream; its bias, if it has one, is still to be added."""

    delta: Tensor
    bias: Tensor | None = None
    place: Place | None = None


@dataclass
class Pass:
    """What every block needs to know of one pass."""

    batch: int
    time: int
    masks: dict[int | None, Tensor | None]
    turns: dict[int, Turn | None]
    neighbours: bool
    narrow: Narrow
    places: dict[nn.Linear, Place]
    sums: dict[nn.Module, Sums]
    aside: Aside | None

    def linear(self, rows: Tensor, layer: nn.Linear, with_bias: bool = False) -> Tensor:
        """The layer's product, with its bias if asked for (then the caller also gives the bias its gradient)."""
        bias = self.narrow[layer.bias] if with_bias and layer.bias is not None else None
        place = self.places.get(layer)
        return Linear.apply(rows, layer.weight, self.narrow[layer.weight], bias, self.aside, place)

    def sums_of(self, part: nn.Module) -> Sums:
        """Where the gradients of a part's vectors are summed."""
        return self.sums.get(part) or Sums(1, self.aside)


def has_fused_pass(model: Any) -> bool:
    """Whether there are kernels for every part of a BraidModel."""
    if not HAS_KERNELS:
        return False
    kinds = (type(model.embedding), type(model.positions), type(model.norm))
    known = ((TokenEmbedding,), (LearnedPositions, NoPositions, RotaryPositions), (LayerNorm, RMSNorm))
    if not all(kind in served for kind, served in zip(kinds, known, strict=True)):
        return False
    return all(type(stage) is BlockStage and all(map(_serves_block, stage.layers)) for stage in model.stages)


def _serves_block(block: nn.Module) -> bool:
    if type(block) is not Block or type(block.attention) is not SoftmaxAttention:
        return False
    if {type(block.attention_norm), type(block.feed_norm)} - {LayerNorm, RMSNorm}:
        return False
    if type(block.feed) not in (MLP, SwiGLU, GEGLU) or getattr(block.feed, "beta", None) is not None:
        return False
    return all(type(m) is nn.Linear for m in _linears(block))


def _linears(block: Any) -> list[nn.Linear]:
    attention, feed = block.attention, block.feed
    return [m for m in (attention.qkv, attention.out, _into(feed), feed.out) if m is not None]


def _into(feed: Any) -> nn.Linear:
    """The layer that a feed-forward part begins with."""
    first: nn.Linear = getattr(feed, "gate_up", None) or feed.up
    return first


def pays(model: Any, ids: Tensor) -> bool:
    """Whether a pass over `ids` will be differentiated on a GPU, outside the compiler."""
    if not (ids.is_cuda and model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return False
    types = {p.dtype for p in model.parameters()}
    return types == {torch.float32} and _compute_dtype(ids.device) in (torch.float32, torch.bfloat16)


def fused_stream(model: Any, ids: Tensor, aside: Aside | None = None, tied: Tied | None = None) -> Tensor:
    """The normalised stream [batch, time, width] of token ids [batch, time].

    With `tied`, the embedding adds its gradient to what the head leaves there.
    """
    dtype = _compute_dtype(ids.device)
    model._check_length(ids.shape[1])
    with torch.autocast(ids.device.type, enabled=False):
        blocks: list[Any] = [block for stage in model.stages for block in stage.layers]
        way = _prepare(model, blocks, ids, dtype, aside)
        learned = model.positions.weight if isinstance(model.positions, LearnedPositions) else None
        stream = model.drop(Embed.apply(ids.contiguous(), model.embedding.weight, learned, dtype, aside, tied))
        written: Written | None = None
        for stage in model.stages:
            for block in stage.layers:
                if written is not None and way.aside is not None:
                    way.aside.join()  # from the second block on: their narrow weights are made beside the first
                stream, written = stage.run(_block, stream, written, block, way)
        _, normed = _add_norm(stream, written, model.norm, None, way)
    return normed.view(*ids.shape, -1)


def _prepare(model: Any, blocks: list[Any], ids: Tensor, dtype: torch.dtype, aside: Aside | None) -> Pass:
    (batch, time), device = ids.shape, ids.device
    trained = [p for block in blocks for p in block.parameters()]
    if len({id(p) for p in trained}) < len(trained):
        aside = None  # autograd adds up the gradients of a shared weight at once, before anything is joined
    places: dict[nn.Linear, Place] = {}
    sums: dict[nn.Module, Sums] = {}
    checkpointing = any(stage.gradient_checkpointing for stage in model.stages)
    if aside is not None and not checkpointing and all(p.requires_grad for p in trained):  # so all will deliver
        places, sums = _places(blocks, batch * time, dtype, aside), _sums(blocks, aside)
    narrow = narrowed(_read_narrow(blocks[:1]), dtype)
    with beside(aside):
        narrow |= narrowed(_read_narrow(blocks[1:]), dtype)
    turns: dict[int, Turn | None] = dict.fromkeys(model.head_dims)
    neighbours = False
    if isinstance(model.positions, RotaryPositions):
        positions = torch.arange(time, device=device)[None]
        neighbours = model.positions.config.pairs == "interleaved"
        for dim in turns:
            cos, sin = model.positions.tables(dim, positions)
            turns[dim] = (cos[0], sin[0])
    masks = make_masks(model.windows, time, 0, None, device)
    return Pass(batch, time, masks, turns, neighbours, narrow, places, sums, aside)


def _read_narrow(blocks: list[Any]) -> list[Tensor]:
    layers = [layer for block in blocks for layer in _linears(block)]
    biases = [block.attention.qkv.bias for block in blocks if block.attention.qkv.bias is not None]
    return [layer.weight for layer in layers] + biases


def _places(blocks: list[Any], rows: int, dtype: torch.dtype, aside: Aside) -> dict[nn.Linear, Place]:
    """Places side by side for layers of one shape whose inputs and gradients are made by kernels of ours."""
    together = ROWS // rows
    places: dict[nn.Linear, Place] = {}
    if together < 2:
        return places
    for begin in range(0, len(blocks), together):
        alike: dict[Any, list[nn.Linear]] = {}
        for block in blocks[begin : begin + together]:
            for kind, layer in enumerate((block.attention.qkv, _into(block.feed), block.feed.out)):
                alike.setdefault((kind, layer.weight.shape), []).append(layer)
        for layers in alike.values():
            stack = Stack(len(layers), rows, layers[0].weight, dtype, aside)
            places |= zip(layers, stack.places(), strict=True)
    return places


def _sums(blocks: list[Any], aside: Aside) -> dict[nn.Module, Sums]:
    """The same for the sums that give vectors their gradients."""
    sums: dict[nn.Module, Sums] = {}
    for begin in range(0, len(blocks), BLOCKS_SUMMED_TOGETHER):
        alike: dict[Any, list[nn.Module]] = {}
        for block in blocks[begin : begin + BLOCKS_SUMMED_TOGETHER]:
            attention, into = block.attention, _into(block.feed)
            alike.setdefault("norm", []).extend((block.attention_norm, block.feed_norm))
            if attention.qkv.bias is not None:
                alike.setdefault((attention.qkv.out_features, attention.head_dim), []).append(attention.qkv)
            if into.bias is not None:
                alike.setdefault((type(block.feed), into.out_features), []).append(into)
        for parts in alike.values():
            sums |= dict.fromkeys(parts, Sums(len(parts), aside))
    return sums


def _block(stream: Tensor, written: Written | None, block: Any, way: Pass) -> tuple[Tensor, Written]:
    """The block's work; what its feed-forward part wrote is still to be added."""
    stream, normed = _add_norm(stream, written, block.attention_norm, block.attention.qkv, way)
    written = _dropped(block, _attend(block.attention, normed, way))
    stream, normed = _add_norm(stream, written, block.feed_norm, _into(block.feed), way)
    return stream, _dropped(block, _feed(block.feed, normed, way))


def _dropped(block: Block, written: Written) -> Written:
    if block.drop.probability == 0.0:
        return written
    delta, bias = written.delta, written.bias
    return Written(block.drop(delta if bias is None else delta + bias.to(delta.dtype)))


def _add_norm(
    stream: Tensor, written: Written | None, norm: LayerNorm | RMSNorm, reader: nn.Linear | None, way: Pass
) -> tuple[Tensor, Tensor]:
    """The stream with what was written, and the same normalised for `reader`."""
    centred = isinstance(norm, LayerNorm)
    vectors = (norm.weight, norm.bias if isinstance(norm, LayerNorm) else None)
    delta, bias, place = (written.delta, written.bias, written.place) if written is not None else (None, None, None)
    normed_place = None if reader is None else way.places.get(reader)
    return AddNorm.apply(stream, delta, bias, *vectors, norm.eps, centred, way.sums_of(norm), normed_place, place)


def _attend(attention: Any, rows: Tensor, way: Pass) -> Written:
    qkv = way.linear(rows, attention.qkv, with_bias=True)
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
    merged = mixed.transpose(1, 2).reshape(way.batch * way.time, -1)
    if attention.out is None:
        return Written(merged)
    return Written(way.linear(merged, attention.out), attention.out.bias)


def _feed(feed: Any, rows: Tensor, way: Pass) -> Written:
    into = _into(feed)
    kind = feed.kind if isinstance(feed, MLP) else "silu" if isinstance(feed, SwiGLU) else "gelu"
    inner = way.linear(rows, into)
    gated = not isinstance(feed, MLP)
    place = way.places.get(feed.out)
    outer = Activation.apply(inner, into.bias, kind, gated, way.sums_of(into), way.places.get(into), place)
    return Written(way.linear(outer, feed.out), feed.out.bias, place)


def _compute_dtype(device: torch.device) -> torch.dtype:
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
