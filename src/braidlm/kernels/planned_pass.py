"""The context through a model in training on a GPU, by kernels pending for it: what `BraidModel.stream` computes, sooner.

Each part that is served here has its plain form in the module it belongs to, which stays the reference and serves every
other case. Rows of the batch are kept flat, [batch * time, width].
"""

from __future__ import annotations  # one of the kernels' types is named below, and may not be there

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.kernels.block import (
    PassContext,
    PendingAdd,
    Turn,
    add_norm,
    attend,
    dropped,
    feed_forward,
    into_feed,
    linears,
    serves_attention,
    serves_feed,
    serves_norm,
)
from braidlm.kernels.gradient_stacks import ROWS, GradientSlot, GradientStack
from braidlm.kernels.routed.layers import (
    UncombinedRows,
    layer_of_blocks,
    projected,
    routed_attention,
    routed_feed,
    routes_with_norm,
    serves_layer,
    serves_projection,
    serves_routed_attention,
    serves_routed_feed,
)
from braidlm.kernels.routed.planning import fold_all, grouped_slots, read_narrow, routed_slots, routed_sums
from braidlm.kernels.side_stream import DeferredGradient, SideStream, current_side_stream, on_side, use_side_stream
from braidlm.model.attention.positions import LearnedPositions, NoPositions, RotaryPositions
from braidlm.model.attention.routed import RoutedAttention
from braidlm.model.attention.softmax import SoftmaxAttention
from braidlm.model.block import Block
from braidlm.model.dropout import Dropout
from braidlm.model.feed.routed import RoutedFeed
from braidlm.model.heads.embedding import TokenEmbedding
from braidlm.model.paths.parallel import ParallelLayer, ParallelStage
from braidlm.model.paths.project import ProjectStage
from braidlm.model.routing.routing import Routings
from braidlm.model.span import make_masks
from braidlm.model.stages import BlockStage

BLOCKS_SUMMED_TOGETHER = 4
"""Whose vectors' gradients are finished by one launch."""
PARTS_OF_A_BLOCK = 2
"""What it adds to the stream, each dropped on its own."""

HAS_KERNELS = False
with contextlib.suppress(ImportError):  # without Triton the plain operations serve every device
    from braidlm.kernels.ops.cast import cast_all
    from braidlm.kernels.ops.column_sums import Sums
    from braidlm.kernels.ops.embedding import Embed
    from braidlm.kernels.routed.gradient_stacks import GroupedGradientSlot

    HAS_KERNELS = True


def has_fused_pass(model: Any) -> bool:
    """Whether there are kernels for every part of a BraidModel."""
    if not HAS_KERNELS or type(model.embedding) is not TokenEmbedding or not serves_norm(model.norm):
        return False
    if type(model.positions) not in (LearnedPositions, NoPositions, RotaryPositions):
        return False
    if isinstance(model.positions, RotaryPositions) and any(_turns_rows(m) for m in model.modules()):
        return False
    return all(map(_serves_stage, model.stages))


def _turns_rows(module: nn.Module) -> bool:
    """Whether its queries stand in sorted rows, where no kernel turns them."""
    return isinstance(module, (RoutedAttention, ParallelLayer))


def _serves_stage(stage: Any) -> bool:
    if type(stage) is ProjectStage:
        return stage.linear is None and stage.experts is not None and serves_projection(stage.experts)
    if type(stage) not in (BlockStage, ParallelStage):
        return False
    return all(serves_layer(layer) or _serves_block(layer) for layer in stage.layers)


def _serves_block(block: nn.Module) -> bool:
    if type(block) is not Block or not (serves_norm(block.attention_norm) and serves_norm(block.feed_norm)):
        return False
    attends = serves_attention(block.attention) or serves_routed_attention(block.attention)
    return attends and (serves_feed(block.feed) or serves_routed_feed(block.feed))


def _is_plain(layer: Any) -> bool:
    return type(layer) is Block and serves_attention(layer.attention) and serves_feed(layer.feed)


def pays(model: Any, ids: Tensor) -> bool:
    """Whether a pass over `ids` will be differentiated on a GPU, outside the compiler."""
    if not (ids.is_cuda and model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return False
    types = {p.dtype for p in model.parameters()}
    return types == {torch.float32} and _compute_dtype(ids.device) in (torch.float32, torch.bfloat16)


def fused_stream(
    model: Any,
    ids: Tensor,
    side: SideStream | None = None,
    tied: DeferredGradient | None = None,
    head: Tensor | None = None,
) -> tuple[Tensor, Routings, Tensor | None]:
    """The normalised stream [batch, time, width] of token ids [batch, time], and the routings on the way.

    With `tied`, the embedding adds its gradient to what the head leaves there. `head` is its matrix, of which a narrow
    copy is made as well.
    """
    dtype = _compute_dtype(ids.device)
    model._check_length(ids.shape[1])
    with torch.autocast(ids.device.type, enabled=False), use_side_stream(side):
        learned = model.positions.weight if isinstance(model.positions, LearnedPositions) else None
        stream: Tensor | UncombinedRows = model.drop(
            Embed.apply(ids.contiguous(), model.embedding.weight, learned, dtype, tied)
        )
        # Autograd adds up the gradients of a shared weight at once, before the side stream is synchronized.
        with use_side_stream(None if _shares_weights(model) else side):
            context = _prepare(model, ids, dtype, [] if head is None else [head])
            pending: PendingAdd | None = None
            routings: Routings = ()
            first = True
            for stage in model.stages:
                for layer in [stage] if isinstance(stage, ProjectStage) else stage.layers:
                    if not (first and _is_plain(layer)):
                        context.synchronize()  # the narrow weights of all others are made beside a plain first block
                    stream, pending, made = stage.run(_layer, stream, pending, layer, context)
                    routings += made
                    first = False
            context.synchronize()
            _, normed = add_norm(_mixed(stream), pending, model.norm, None, context)
    return normed.view(*ids.shape, -1), routings, None if head is None else context.narrow[head]


def _layer(
    stream: Tensor | UncombinedRows, pending: PendingAdd | None, layer: Any, context: PassContext
) -> tuple[Tensor | UncombinedRows, PendingAdd | None, Routings]:
    """The stream after a layer; what was pending last is still to be added."""
    with use_side_stream(context.side):  # with activation checkpointing a thread of autograd's comes here again
        if isinstance(layer, ParallelLayer):
            uncombined, routing = layer_of_blocks(stream, pending, layer, context)
            return uncombined, None, (routing,)
        if isinstance(layer, ProjectStage):
            made, routing = projected(layer.experts, _mixed(stream), pending, context)
            return made, None, (routing,)
        return _block(_mixed(stream), pending, layer, context)


def _mixed(stream: Tensor | UncombinedRows) -> Tensor:
    return stream if isinstance(stream, Tensor) else stream.mixed()


def _block(
    stream: Tensor, pending: PendingAdd | None, block: Any, context: PassContext
) -> tuple[Tensor, PendingAdd, Routings]:
    routings: Routings = ()
    if isinstance(block.attention, RoutedAttention):
        stream, made, routing = routed_attention(stream, pending, block.attention_norm, block.attention, context)
        routings += (routing,)
    else:
        stream, normed = add_norm(stream, pending, block.attention_norm, block.attention.qkv, context)
        made = attend(block.attention, normed, context)
    pending = dropped(block, made, 0, context)
    if isinstance(block.feed, RoutedFeed):
        stream, made, routing = routed_feed(stream, pending, block.feed_norm, block.feed, context)
        routings += (routing,)
    else:
        stream, normed = add_norm(stream, pending, block.feed_norm, into_feed(block.feed), context)
        made = feed_forward(block.feed, normed, context)
    return stream, dropped(block, made, 1, context), routings


def _shares_weights(model: Any) -> bool:
    parameters = [p for stage in model.stages for p in stage.parameters()]
    return len({id(p) for p in parameters}) < len(parameters)


def _prepare(model: Any, ids: Tensor, dtype: torch.dtype, late: list[Tensor]) -> PassContext:
    """`late` are matrices that are read after all layers."""
    (batch, time), device, side = ids.shape, ids.device, current_side_stream()
    blocks = [module for module in model.modules() if type(module) is Block and _is_flat(module)]
    trained = [p for stage in model.stages for p in stage.parameters()]
    slots: dict[nn.Module, GradientSlot] = {}
    sums: dict[nn.Module, Sums] = {}
    grouped: dict[nn.Module, GroupedGradientSlot] = {}
    checkpointing = any(stage.gradient_checkpointing for stage in model.stages)
    if side is not None and not checkpointing and all(p.requires_grad for p in trained):  # so all will deliver
        slots, sums = _slots(blocks, batch * time, dtype), _sums(blocks)
        slots |= routed_slots(model, batch * time, dtype)
        grouped, sums = grouped_slots(model, batch * time, dtype), sums | routed_sums(model)
    narrow = cast_all(_read_narrow(blocks[:1]), dtype)
    with on_side(side):
        narrow |= cast_all(_read_narrow(blocks[1:]) + read_narrow(model), dtype)
    turns: dict[int, Turn | None] = dict.fromkeys(model.head_dims)
    interleaved = False
    if isinstance(model.positions, RotaryPositions):
        positions = torch.arange(time, device=device)[None]
        interleaved = model.positions.config.pairs == "interleaved"
        for dim in turns:
            cos, sin = model.positions.tables(dim, positions)
            turns[dim] = (cos[0], sin[0])
    masks = make_masks(model.windows, time, 0, None, device)
    seeds: dict[nn.Module, Tensor] = {}
    if any(isinstance(m, Dropout) and m.probability for m in model.modules()):
        parts = [module for module in model.modules() if isinstance(module, (Block, SoftmaxAttention))]
        seeds = dict(zip(parts, torch.randint(2**31, (len(parts), PARTS_OF_A_BLOCK, 1), device=device), strict=True))
    foldings = fold_all(model, dtype)
    return PassContext(
        batch, time, masks, turns, interleaved, narrow, slots, sums, foldings, grouped=grouped, seeds=seeds,
        late=partial(cast_all, late, dtype),
    )  # fmt: skip


def _is_flat(block: Any) -> bool:
    """Whether any of its parts is plain, and not a bank's."""
    return getattr(block.attention, "stack", None) is None


def _read_narrow(blocks: list[Any]) -> list[Tensor]:
    layers = [layer for block in blocks for layer in linears(block)]
    attentions = [block.attention for block in blocks if serves_attention(block.attention)]
    biases = [attention.qkv.bias for attention in attentions if attention.qkv.bias is not None]
    return [layer.weight for layer in layers] + biases


def _slots(blocks: list[Any], rows: int, dtype: torch.dtype) -> dict[nn.Module, GradientSlot]:
    """Places side by side for layers of one shape whose inputs and gradients are made by kernels of ours."""
    together = ROWS // rows
    slots: dict[nn.Module, GradientSlot] = {}
    if together < 2:
        return slots
    for begin in range(0, len(blocks), together):
        alike: dict[Any, list[nn.Linear]] = {}
        for block in blocks[begin : begin + together]:
            layers = [("qkv", block.attention.qkv)] if serves_attention(block.attention) else []
            if serves_feed(block.feed):
                layers += [("into", into_feed(block.feed)), ("out", block.feed.out)]
            for kind, layer in layers:
                alike.setdefault((kind, layer.weight.shape), []).append(layer)
        for layers_alike in alike.values():
            stack = GradientStack(len(layers_alike), rows, layers_alike[0].weight.shape, dtype)
            slots |= zip(layers_alike, stack.slots(), strict=True)
    return slots


def _sums(blocks: list[Any]) -> dict[nn.Module, Sums]:
    """The same for the sums that give vectors their gradients."""
    sums: dict[nn.Module, Sums] = {}
    for begin in range(0, len(blocks), BLOCKS_SUMMED_TOGETHER):
        alike: dict[Any, list[nn.Module]] = {}
        for block in blocks[begin : begin + BLOCKS_SUMMED_TOGETHER]:
            for norm, part in ((block.attention_norm, block.attention), (block.feed_norm, block.feed)):
                if not routes_with_norm(part):
                    alike.setdefault((type(norm), norm.weight.shape), []).append(norm)
            attention, feed = block.attention, block.feed
            if serves_attention(attention) and attention.qkv.bias is not None:
                alike.setdefault((attention.qkv.out_features, attention.head_dim), []).append(attention.qkv)
            if serves_feed(feed) and into_feed(feed).bias is not None:
                into = into_feed(feed)
                alike.setdefault((type(feed), into.out_features), []).append(into)
        for parts in alike.values():
            sums |= dict.fromkeys(parts, Sums(len(parts)))
    return sums


def _compute_dtype(device: torch.device) -> torch.dtype:
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
