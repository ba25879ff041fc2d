"""The way through a model in training on a GPU, by kernels written for it: what `BraidModel.stream` computes, sooner.

Each part that is served here has its plain form in the module it belongs to, which stays the reference and serves every
other case. Rows of the batch are kept flat, [batch * time, width].
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .aside import Aside
from .attention import SoftmaxAttention
from .block import Block
from .embedding import TokenEmbedding
from .feed import GEGLU, MLP, SwiGLU
from .fused_linear import Narrow, linear, narrowed
from .norms import LayerNorm, RMSNorm
from .positions import LearnedPositions, NoPositions, RotaryPositions
from .span import make_masks
from .stages import BlockStage

HAS_KERNELS = False
with contextlib.suppress(ImportError):  # without Triton the plain operations serve every device
    from .fused_activation import Activation
    from .fused_embedding import Embed
    from .fused_heads import SplitHeads
    from .fused_norm import AddNorm

    HAS_KERNELS = True

Turn = tuple[Tensor, Tensor]
Written = tuple[Tensor, Tensor | None]
"""What a part adds to the stream, and a bias still to be added to it."""


@dataclass
class Pass:
    """What every block needs to know of one pass."""

    batch: int
    time: int
    masks: dict[int | None, Tensor | None]
    turns: dict[int, Turn | None]
    neighbours: bool
    narrow: Narrow
    aside: Aside | None


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


def _linears(block: Block) -> list[nn.Linear]:
    attention, feed = block.attention, block.feed
    into = feed.up if isinstance(feed, MLP) else feed.gate_up
    return [m for m in (attention.qkv, attention.out, into, feed.out) if m is not None]


def pays(model: Any, ids: Tensor) -> bool:
    """Whether a pass over `ids` will be differentiated on a GPU, outside the compiler."""
    if not (ids.is_cuda and model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return False
    types = {p.dtype for p in model.parameters()}
    return types == {torch.float32} and _compute_dtype(ids.device) in (torch.float32, torch.bfloat16)


def fused_stream(model: Any, ids: Tensor, aside: Aside | None = None) -> Tensor:
    """The normalised stream [batch, time, width] of token ids [batch, time]."""
    dtype = _compute_dtype(ids.device)
    model._check_length(ids.shape[1])
    with torch.autocast(ids.device.type, enabled=False):
        blocks: list[Block] = [block for stage in model.stages for block in stage.layers]
        way = _prepare(model, blocks, ids, dtype, aside)
        learned = model.positions.weight if isinstance(model.positions, LearnedPositions) else None
        stream = model.drop(Embed.apply(ids.contiguous(), model.embedding.weight, learned, dtype, aside))
        delta: Tensor | None = None
        bias: Tensor | None = None
        for stage in model.stages:
            for block in stage.layers:
                stream, delta, bias = stage.run(_block, stream, delta, bias, block, way)
        _, normed = _add_norm(stream, delta, bias, model.norm, way)
    return normed.view(*ids.shape, -1)


def _prepare(model: Any, blocks: list[Block], ids: Tensor, dtype: torch.dtype, aside: Aside | None) -> Pass:
    (batch, time), device = ids.shape, ids.device
    layers = [layer for block in blocks for layer in _linears(block)]
    biases = [block.attention.qkv.bias for block in blocks if block.attention.qkv.bias is not None]
    wide = [layer.weight for layer in layers] + biases
    if len({id(p) for p in wide}) < len(wide):
        aside = None  # autograd adds up the gradients of a shared weight at once, before anything is joined
    positions = torch.arange(time, device=device)[None]
    turns: dict[int, Turn | None] = dict.fromkeys(model.head_dims)
    neighbours = False
    if isinstance(model.positions, RotaryPositions):
        neighbours = model.positions.config.pairs == "interleaved"
        for dim in turns:
            cos, sin = model.positions.tables(dim, positions)
            turns[dim] = (cos[0], sin[0])
    masks = make_masks(model.windows, time, 0, None, device)
    return Pass(batch, time, masks, turns, neighbours, narrowed(wide, dtype), aside)


def _block(
    stream: Tensor, delta: Tensor | None, bias: Tensor | None, block: Block, way: Pass
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The block's work; what its feed-forward part wrote is still to be added."""
    stream, normed = _add_norm(stream, delta, bias, block.attention_norm, way)
    delta, bias = _dropped(block, *_attend(block.attention, normed, way))
    stream, normed = _add_norm(stream, delta, bias, block.feed_norm, way)
    return stream, *_dropped(block, *_feed(block.feed, normed, way))


def _dropped(block: Block, delta: Tensor, bias: Tensor | None) -> Written:
    if block.drop.probability == 0.0:
        return delta, bias
    return block.drop(delta if bias is None else delta + bias.to(delta.dtype)), None


def _add_norm(
    stream: Tensor, delta: Tensor | None, bias: Tensor | None, norm: LayerNorm | RMSNorm, way: Pass
) -> tuple[Tensor, Tensor]:
    centred = isinstance(norm, LayerNorm)
    norm_bias = norm.bias if isinstance(norm, LayerNorm) else None
    return AddNorm.apply(stream, delta, bias, norm.weight, norm_bias, norm.eps, centred, way.aside)


def _attend(attention: SoftmaxAttention, rows: Tensor, way: Pass) -> Written:
    qkv = linear(rows, attention.qkv, way.narrow, way.aside, with_bias=True)
    query, key, value = SplitHeads.apply(
        qkv.view(way.batch, way.time, -1, attention.head_dim),
        attention.qkv.bias,
        way.turns[attention.head_dim],
        way.neighbours,
        attention.kv_heads,
        way.aside,
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
        return merged, None
    return linear(merged, attention.out, way.narrow, way.aside), attention.out.bias


def _feed(feed: MLP | SwiGLU | GEGLU, rows: Tensor, way: Pass) -> Written:
    into = feed.up if isinstance(feed, MLP) else feed.gate_up
    kind = feed.kind if isinstance(feed, MLP) else "silu" if isinstance(feed, SwiGLU) else "gelu"
    inner = linear(rows, into, way.narrow, way.aside)
    outer = Activation.apply(inner, into.bias, kind, not isinstance(feed, MLP), way.aside)
    return linear(outer, feed.out, way.narrow, way.aside), feed.out.bias


def _compute_dtype(device: torch.device) -> torch.dtype:
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
