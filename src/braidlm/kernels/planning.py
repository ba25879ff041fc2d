"""What a pass prepares before its first layer: casts, folded weights, and memory for gradients.

The gradients of layers of one shape lie side by side, so that one launch serves all of them.

Every function takes the parts that kernels serve, in the order of the model, and nothing else: whoever gets a slot here
must also deliver, or the others would wait for it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from braidlm.kernels.dense_layers import first_linear
from braidlm.kernels.gradient_stacks import ROWS, GradientSlot, GradientStack
from braidlm.kernels.ops.column_sums import ColumnSums
from braidlm.kernels.ops.fold import Bank, Folding, fold
from braidlm.kernels.routed.gradient_stacks import ROWS as GROUPED_ROWS
from braidlm.kernels.routed.gradient_stacks import Gathered, GroupedGradientStack
from braidlm.kernels.routed.permutation import TILE, row_bound
from braidlm.kernels.routed_layers import routes_with_norm
from braidlm.model.attention.mixture_of_heads import MixtureOfHeads
from braidlm.model.attention.routed import RoutedAttention
from braidlm.model.attention.softmax import SoftmaxAttention
from braidlm.model.attention.stick_breaking import StickBreakingAttention
from braidlm.model.block import Block
from braidlm.model.feed.feeds import GEGLU, MLP, SwiGLU
from braidlm.model.feed.routed import RoutedFeed
from braidlm.model.mixture_of_depths import MixtureOfDepths
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.paths.project import ProjectStage

BLOCKS_SUMMED_TOGETHER = 4
"""Blocks whose vectors' gradients are finished by one launch."""
FEEDS = (MLP, SwiGLU, GEGLU)
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
    """For layers of one shape: dense ones, the first of attention banks, and those of routers that choose depths."""
    slots: dict[nn.Module, GradientSlot] = {}
    together = ROWS // rows
    if together < 2:
        return slots
    for some in _chunks(_blocks(layers), together):
        alike: dict[Any, list[nn.Linear]] = {}
        for _, part in _parts(some):
            if _is(part, SoftmaxAttention):
                alike.setdefault(("qkv", part.qkv.weight.shape), []).append(part.qkv)
            elif _is(part, *FEEDS):
                for kind, linear in (("first", first_linear(part)), ("out", part.out)):
                    alike.setdefault((kind, linear.weight.shape), []).append(linear)
        for linears in alike.values():
            stack = GradientStack(len(linears), rows, linears[0].weight.shape, dtype)
            slots |= zip(linears, stack.slots(), strict=True)
    routers: dict[Any, list[Any]] = {}
    for _, part in _parts(layers):
        if _is(part, MixtureOfDepths):
            routers.setdefault(part.router.inner.weight.shape, []).append(part.router.inner)
    for shape, inners in routers.items():
        for inners_together in _chunks(inners, together):
            stack = GradientStack(len(inners_together), rows, shape, dtype)
            slots |= zip(inners_together, stack.slots(), strict=True)
    banks: dict[Any, list[Any]] = {}
    for bank in _attention_banks(layers):
        banks.setdefault(bank.qkv.weight.shape, []).append(bank.qkv)
    for (members, inputs, outputs), linears_of_banks in banks.items():
        for linears_together in _chunks(linears_of_banks, together):
            shape = (members * outputs, inputs)
            stack = GradientStack(len(linears_together), rows, shape, dtype, transposed=True)
            slots |= zip(linears_together, stack.slots(), strict=True)
    return slots


def grouped_gradient_slots(layers: Layers, tokens: int, dtype: torch.dtype) -> dict[nn.Module, GradientSlot]:
    """For the matrices of banks of one shape, but for those of projections."""
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
        elif _is(part, RoutedFeed):
            if part.shared is None:  # else the rows that both read lie where the shared part needs them
                add(first_linear(part.bank), part.router.config.top_k, "inputs", summed=True)
            add(part.bank.out, part.router.config.top_k, "gradients")
    slots: dict[nn.Module, GradientSlot] = {}
    for (shape, biased, top_k, gathered), linears in alike.items():
        rows = row_bound(tokens, top_k, shape[0], TILE)
        if GROUPED_ROWS // rows < 2:
            continue
        for some in _chunks(linears, GROUPED_ROWS // rows):
            stack = GroupedGradientStack(len(some), rows, shape, dtype, biased, gathered, tokens)
            slots |= zip(some, stack.slots(), strict=True)
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
            if _is(part, *FEEDS) and first_linear(part).bias is not None:
                alike.setdefault((type(part), first_linear(part).weight.shape), []).append(first_linear(part))
        sums |= _shared_sums(alike)
    routers: dict[Any, list[nn.Module]] = {}
    for _, part in _parts(layers):
        router = _router_of(part)
        if _is(part, MixtureOfDepths):
            routers.setdefault((MixtureOfDepths, part.score.weight.shape), []).append(part.score)
        elif router is not None:  # those of projections read no norm, and sum less
            routers.setdefault((_is(part, ProjectStage), router.scores.weight.shape), []).append(router)
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


def _chunks(items: list[T], size: int) -> Iterable[list[T]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
