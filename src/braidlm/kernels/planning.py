"""What a pass prepares before its first layer: casts, folded weights, and memory for gradients.

The gradients of layers of one shape lie side by side, so that one launch serves all of them.

Every function takes the parts that kernels serve, in the order of the model, and nothing else: whoever gets a slot here
must also deliver, or the others would wait for it.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from braidlm.kernels.dense_layers import FEEDS, first_linear
from braidlm.kernels.dispatching import routes_with_norm
from braidlm.kernels.gradient_stacks import ROWS, GradientSlot, GradientStack, StackedRows
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.fold import Bank, Folding, fold
from braidlm.kernels.routed.gradient_stacks import ROWS as GROUPED_ROWS
from braidlm.kernels.routed.gradient_stacks import Gathered, GroupedGradientStack
from braidlm.kernels.routed.permutation import TILE, row_bound
from braidlm.model.attention.mixture_of_heads import MixtureOfHeads
from braidlm.model.attention.routed import RoutedAttention
from braidlm.model.attention.softmax import SoftmaxAttention
from braidlm.model.attention.stick_breaking import StickBreakingAttention
from braidlm.model.block import Block
from braidlm.model.feed.routed import RoutedFeed
from braidlm.model.mixture_of_depths import MixtureOfDepths
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.paths.project import ProjectStage

BLOCKS_SUMMED_TOGETHER = 4
"""Blocks whose vectors' gradients are finished by one launch."""
T = TypeVar("T")
Layers = list[tuple[nn.Module, set[nn.Module]]]
"""The layers in the order of the model, each with the set of all parts that are lowered."""


def row_groups(layers: list[Any], lowered: set[nn.Module], batch: int, time: int) -> list[tuple[int, Layers]]:
    """The layers with the number of rows that they compute: blocks inside a mixture of depths, in training, have fewer.

    Where there are such blocks, the groups end after as many layers as a stack of gradients holds: else all of them
    would be complete only at the end of the backward pass, with nothing left to run beside them.
    """
    outer = [layer for layer in layers if not _is(layer, MixtureOfDepths) or layer.training]
    depths = any(_is(layer, MixtureOfDepths) for layer in outer)
    together = max(1, ROWS // (batch * time) if depths else len(outer))
    groups: list[tuple[int, Layers]] = []
    for some in _chunks(outer, together):
        by_rows: dict[int, Layers] = {batch * time: [(layer, lowered) for layer in some]}
        for layer in some:
            if _is(layer, MixtureOfDepths):
                by_rows.setdefault(batch * layer.count(time), []).append((layer.block, lowered))
        groups += by_rows.items()
    return groups


def united(parts: Iterable[dict[nn.Module, T]]) -> dict[nn.Module, T]:
    """The entries of several dictionaries in one."""
    return {key: value for part in parts for key, value in part.items()}


def read_parameters(layers: Layers) -> list[Tensor]:
    """The parameters that products read as they are, in a cast copy: not those that are folded."""
    read: list[Tensor | None] = []
    for _, part in _parts(layers):
        if _is(part, SoftmaxAttention, StickBreakingAttention):
            read += [part.qkv.weight, part.qkv.bias, None if part.out is None else part.out.weight]
        elif _is(part, MixtureOfHeads):
            read += [part.queries.weight, part.out.weight]
            read += [] if part.keys_values is None else [part.keys_values.weight, part.keys_values.bias]
        elif _is(part, *FEEDS):
            read += [first_linear(part).weight, part.out.weight]
        elif _is(part, RoutedAttention):
            read.append(part.bank.out.weight)
        elif _is(part, RoutedFeed):
            read += [first_linear(part.bank).weight, part.bank.out.weight]
            read += [] if part.shared is None else [first_linear(part.shared).weight, part.shared.out.weight]
        elif _is(part, ParallelLayer):
            block = _stacked_block(part)
            read += [block.attention.out.weight, block.feed.out.weight]
        elif _is(part, MixtureOfDepths):
            read.append(part.router.inner.weight)
        elif _is(part, ProjectStage):
            experts: Any = part.experts
            read += [linear.weight for linear in (experts.gate_up, experts.out) if linear is not None]
    return list(dict.fromkeys(parameter for parameter in read if parameter is not None))  # layers may share some


def fold_all(layers: Layers, dtype: torch.dtype) -> list[Folding]:
    """Matrices with their norm folded in, or with the members of a bank side by side; those of one shape at once."""
    alike: dict[Any, dict[nn.Module, Bank]] = {}

    def add(linear: Any, wide: bool, norm: Any = None) -> None:
        vectors = () if norm is None else (norm.weight, getattr(norm, "bias", None))
        bank = Bank(linear.weight, linear.bias, *vectors)
        kind = (wide, linear.weight.shape, *(part is None for part in (bank.bias, bank.scale, bank.shift)))
        alike.setdefault(kind, {})[linear] = bank

    for _, part in _parts(layers):
        if _is(part, ParallelLayer):
            block = _stacked_block(part)
            add(block.attention.qkv, True, block.attention_norm)
            add(first_linear(block.feed), False, block.feed_norm)
        elif _is(part, RoutedAttention):
            add(part.bank.qkv, True)
    return [fold(banks, kind[0], dtype) for kind, banks in alike.items()]


def gradient_slots(layers: Layers, rows: int, dtype: torch.dtype) -> dict[nn.Module, GradientSlot]:
    """The slots of all matrices that have some, where each layer computes so many rows."""
    dense, grouped = _dense_slots(layers, rows, dtype), _grouped_slots(layers, rows, dtype)
    return dense | grouped | _routed_feed_slots(layers, rows, dtype)


def _dense_slots(layers: Layers, rows: int, dtype: torch.dtype) -> dict[nn.Module, GradientSlot]:
    """For layers of one shape: dense ones, the first of attention banks, and those of routers that choose depths."""
    slots: dict[nn.Module, GradientSlot] = {}
    together = ROWS // rows
    if together < 2:
        return slots

    def add(linears: list[Any], outputs: int, inputs: int, transposed: bool = False) -> None:
        read, gradients = (StackedRows(len(linears), rows, width, dtype) for width in (inputs, outputs))
        slots.update(_slots(linears, GradientStack(read, gradients, transposed)))

    for some in _chunks(_blocks(layers), together):
        alike: dict[Any, list[nn.Linear]] = {}
        for _, part in _parts(some):
            if _is(part, SoftmaxAttention):
                alike.setdefault(("qkv", part.qkv.weight.shape), []).append(part.qkv)
            elif _is(part, *FEEDS):
                for kind, linear in (("first", first_linear(part)), ("out", part.out)):
                    alike.setdefault((kind, linear.weight.shape), []).append(linear)
        for (_, shape), linears in alike.items():
            add(linears, *shape)
    routers: dict[Any, list[Any]] = {}
    for _, part in _parts(layers):
        if _is(part, MixtureOfDepths):
            routers.setdefault(part.router.inner.weight.shape, []).append(part.router.inner)
    for shape, inners in routers.items():
        for inners_together in _chunks(inners, together):
            add(inners_together, *shape)
    banks: dict[Any, list[Any]] = {}
    for bank in _attention_banks(layers):
        banks.setdefault(bank.qkv.weight.shape, []).append(bank.qkv)
    for (members, inputs, outputs), linears_of_banks in banks.items():
        for linears_together in _chunks(linears_of_banks, together):
            add(linears_together, members * outputs, inputs, transposed=True)
    return slots


def _grouped_slots(layers: Layers, tokens: int, dtype: torch.dtype) -> dict[nn.Module, GradientSlot]:
    """For the matrices of banks of one shape, but for those of projections and of feed-forward experts."""
    alike: dict[Any, list[nn.Module]] = {}

    def add(linear: Any, top_k: int, gathered: Gathered | None = None, summed: bool = False) -> None:
        """`summed`: the kernel that computes the layer's gradient also sums it for the bias."""
        biased = linear.bias is not None and not summed
        alike.setdefault((tuple(linear.weight.shape), biased, top_k, gathered), []).append(linear)

    for _, part in _parts(layers):
        if _is(part, ParallelLayer):
            block, top_k = _stacked_block(part), part.join.router.config.top_k
            add(block.attention.out, top_k)
            add(first_linear(block.feed), top_k, summed=True)
            add(block.feed.out, top_k)
        elif _is(part, RoutedAttention):
            add(part.bank.out, part.router.config.top_k)
        elif _is(part, MixtureOfHeads):
            add(part.queries, part.router.config.top_k, "inputs")
            add(part.out, part.router.config.top_k)
    slots: dict[nn.Module, GradientSlot] = {}
    for ((experts, width, outputs), biased, top_k, gathered), linears in alike.items():
        rows = row_bound(tokens, top_k, experts, TILE)
        for some in _banks_together(linears, rows):
            inputs = StackedRows(len(some), tokens if gathered else rows, width, dtype)
            gradients = StackedRows(len(some), rows, outputs, dtype)
            slots |= _slots(some, GroupedGradientStack(experts, inputs, gradients, biased, gathered))
    return slots


def _routed_feed_slots(layers: Layers, tokens: int, dtype: torch.dtype) -> dict[nn.Module, GradientSlot]:
    """For the matrices of feed-forward experts, of the shared part beside them and of a router with many choices.

    They all read the same rows, and the gradient of the sum of experts and shared part is that of either.
    """
    alike: dict[Any, list[Any]] = {}
    for _, part in _parts(layers):
        if _is(part, RoutedFeed) and not part.drop.probability:  # with dropout, rows have gradients of their own
            shapes = [first_linear(feed).weight.shape for feed in (part.bank, part.shared) if feed is not None]
            scored = part.router.inner is None and not routes_with_norm(part.router)  # by the rows themselves
            kind = (part.router.config.top_k, scored, type(part.bank), part.bank.out.bias is None, *shapes)
            alike.setdefault(kind, []).append(part)
    slots: dict[nn.Module, GradientSlot] = {}
    for (top_k, scored, *_), parts in alike.items():
        bank, shared = parts[0].bank, parts[0].shared
        (experts, width, inner), hidden = first_linear(bank).weight.shape, bank.out.weight.shape[1]
        rows = row_bound(tokens, top_k, experts, TILE)
        for some in _banks_together(parts, rows):
            stacked = partial(StackedRows, len(some), dtype=dtype)
            inputs, gradients, biased = stacked(tokens, width), stacked(tokens, width), bank.out.bias is not None
            up = GroupedGradientStack(experts, inputs, stacked(rows, inner), gathered="inputs")
            out = GroupedGradientStack(experts, stacked(rows, hidden), gradients, biased, "gradients")
            slots |= _slots([first_linear(part.bank) for part in some], up)
            slots |= _slots([part.bank.out for part in some], out)
            if scored:
                scores = GradientStack(inputs, stacked(tokens, experts))
                slots |= _slots([part.router.scores for part in some], scores)
            if shared is not None:
                (shared_inner, _), shared_hidden = first_linear(shared).weight.shape, shared.out.weight.shape[1]
                up_beside = GradientStack(inputs, stacked(tokens, shared_inner))
                out_beside = GradientStack(stacked(tokens, shared_hidden), gradients)
                slots |= _slots([first_linear(part.shared) for part in some], up_beside)
                slots |= _slots([part.shared.out for part in some], out_beside)
    return slots


def column_sums(layers: Layers) -> dict[nn.Module, ColumnSums]:
    """Where the gradients of vectors and of routers are summed: parts of one shape together."""
    sums: dict[nn.Module, ColumnSums] = {}
    for some in _chunks(_blocks(layers), BLOCKS_SUMMED_TOGETHER):
        alike: dict[Any, list[nn.Module]] = {}
        for block, part in _parts(some):
            norm: Any = block.attention_norm if part is block.attention else block.feed_norm
            router = getattr(part, "router", None)
            if router is None or not routes_with_norm(router):
                alike.setdefault((type(norm), norm.weight.shape), []).append(norm)
            if _is(part, SoftmaxAttention) and part.qkv.bias is not None:
                alike.setdefault((part.qkv.weight.shape, part.head_dim), []).append(part.qkv)
            feed: Any = part.shared if _is(part, RoutedFeed) else part
            if _is(feed, *FEEDS) and first_linear(feed).bias is not None:
                alike.setdefault((type(feed), first_linear(feed).weight.shape), []).append(first_linear(feed))
        sums |= _shared_sums(alike)
    routers: dict[Any, list[nn.Module]] = {}
    for _, part in _parts(layers):
        router = _router_of(part)
        if _is(part, MixtureOfDepths):
            routers.setdefault((MixtureOfDepths, part.score.weight.shape), []).append(part.score)
        elif router is not None:  # beside a projection's router there is no norm to sum for, and a path's is folded in
            summed = type(part) if _is(part, ProjectStage, ParallelLayer) else None
            kind = (summed, routes_with_norm(router), router.scores.weight.shape)
            routers.setdefault(kind, []).append(router)
    for bank in _attention_banks(layers):
        routers.setdefault((bank.heads, bank.qkv.weight.shape), []).append(bank.qkv)
    return sums | _shared_sums(routers)


def _shared_sums(alike: dict[Any, list[nn.Module]]) -> dict[nn.Module, ColumnSums]:
    return {part: sums for parts in alike.values() for sums in [ColumnSums(len(parts))] for part in parts}


def _parts(layers: Layers) -> Iterator[tuple[Any, Any]]:
    """Each lowered part with its layer; a parallel layer or a projection is its own only part."""
    for layer, lowered in layers:
        if isinstance(layer, Block):
            yield from ((layer, part) for part in (layer.attention, layer.feed) if part in lowered)
        elif layer in lowered:
            yield layer, layer


def _is(part: Any, *kinds: type[nn.Module]) -> bool:
    return type(part) in kinds


def _blocks(layers: Layers) -> Layers:
    return [(layer, lowered) for layer, lowered in layers if isinstance(layer, Block)]


def _stacked_block(layer: Any) -> Any:
    return layer.stack[0]


def _attention_banks(layers: Layers) -> list[Any]:
    """The attentions that have queries for routed tokens only."""
    found = []
    for _, part in _parts(layers):
        if _is(part, ParallelLayer):
            found.append(_stacked_block(part).attention)
        elif _is(part, RoutedAttention):
            found.append(part.bank)
    return found


def _router_of(part: Any) -> Any:
    if _is(part, ParallelLayer):
        return part.join.router
    if _is(part, ProjectStage):
        return part.experts.router
    return getattr(part, "router", None)


def _slots(matrices: list[Any], stack: GradientStack) -> dict[nn.Module, GradientSlot]:
    return dict(zip(matrices, stack.slots(), strict=True))


def _banks_together(banks: list[T], rows: int) -> Iterable[list[T]]:
    """The banks of each stack, where each bank has so many rows; none where a single one fills the device."""
    together = GROUPED_ROWS // rows
    return _chunks(banks, together) if together > 1 else ()


def _chunks(items: list[T], size: int) -> Iterable[list[T]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
