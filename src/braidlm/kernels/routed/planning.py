"""What is laid out for the routed parts of a model before a pass: folded weights, slots for gradients side by side."""

from __future__ import annotations  # some of the kernels' types are named below, and may not be there

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.kernels.block import into_feed
from braidlm.kernels.gradient_stacks import ROWS, GradientSlot, GradientStack
from braidlm.model.attention.routed import RoutedAttention
from braidlm.model.feed.routed import RoutedFeed
from braidlm.model.paths.expert_projection import ExpertProjection
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.routing.router import TopKRouter

with contextlib.suppress(ImportError):  # without Triton the plain operations serve every device
    from braidlm.kernels.ops.column_sums import Sums
    from braidlm.kernels.ops.fold import Bank, Folding, fold
    from braidlm.kernels.routed.gradient_stacks import ROWS as GROUPED_ROWS
    from braidlm.kernels.routed.gradient_stacks import GroupedGradientSlot, GroupedGradientStack
    from braidlm.kernels.routed.permutation import TILE, row_bound


def fold_all(model: nn.Module, dtype: torch.dtype) -> list[Folding]:
    """The matrices that read norms of their own or stand side by side, layers of one shape together."""
    alike: dict[Any, dict[nn.Module, Bank]] = {}

    def add(layer: Any, wide: bool, norm: Any = None) -> None:
        vectors = () if norm is None else (norm.weight, getattr(norm, "bias", None))
        bank = Bank(layer.weight, layer.bias, *vectors)
        kind = (wide, layer.weight.shape, *(part is None for part in (bank.bias, bank.scale, bank.shift)))
        alike.setdefault(kind, {})[layer] = bank

    for module in model.modules():
        if isinstance(module, ParallelLayer) and module.stack is not None:
            block: Any = module.stack[0]
            add(block.attention.qkv, True, block.attention_norm)
            add(into_feed(block.feed), False, block.feed_norm)
        elif isinstance(module, RoutedAttention):
            add(module.bank.qkv, True)
    return [fold(banks, kind[0], dtype) for kind, banks in alike.items()]


def _attention_banks(model: nn.Module) -> list[Any]:
    """All that have queries for routed tokens only."""
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, ParallelLayer) and module.stack is not None:
            found.append(module.stack[0].attention)
        elif isinstance(module, RoutedAttention):
            found.append(module.bank)
    return found


def routed_slots(model: nn.Module, rows: int, dtype: torch.dtype) -> dict[nn.Module, GradientSlot]:
    """Places side by side for the first layers of attention banks of one shape."""
    together, alike = ROWS // rows, {}  # type: ignore[var-annotated]
    slots: dict[nn.Module, GradientSlot] = {}
    if together < 2:
        return slots
    for bank in _attention_banks(model):
        alike.setdefault(bank.qkv.weight.shape, []).append(bank.qkv)
    for (members, inputs, outputs), layers in alike.items():
        for begin in range(0, len(layers), together):
            some = layers[begin : begin + together]
            stack = GradientStack(len(some), rows, (members * outputs, inputs), dtype, turned=True)
            slots |= zip(some, stack.slots(), strict=True)
    return slots


def grouped_slots(model: nn.Module, tokens: int, dtype: torch.dtype) -> dict[nn.Module, GroupedGradientSlot]:
    """Places side by side for the matrices of banks of one shape, but for those of projections."""
    alike: dict[Any, list[nn.Module]] = {}

    def add(layer: Any, top_k: int, gathers: bool, summed: bool = False) -> None:
        """`summed`: who makes the layer's gradient sums it for the bias."""
        biased = layer.bias is not None and not summed
        alike.setdefault((tuple(layer.weight.shape), biased, top_k, gathers), []).append(layer)

    for module in model.modules():
        if isinstance(module, ParallelLayer) and module.stack is not None:
            block: Any = module.stack[0]
            top_k = module.join.router.config.top_k
            add(block.attention.out, top_k, False)
            add(into_feed(block.feed), top_k, False, summed=True)
            add(block.feed.out, top_k, False)
        elif isinstance(module, RoutedAttention):
            add(module.bank.out, module.router.config.top_k, False)
        elif isinstance(module, RoutedFeed):
            if module.shared is None:  # else what both read stands where the shared part wants it
                add(into_feed(module.bank), module.router.config.top_k, True, summed=True)
            add(module.bank.out, module.router.config.top_k, False)
    slots: dict[nn.Module, GroupedGradientSlot] = {}
    for (shape, biased, top_k, gathers), layers in alike.items():
        rows = row_bound(tokens, top_k, shape[0], TILE)
        together = GROUPED_ROWS // rows
        if together < 2:
            continue
        for begin in range(0, len(layers), together):
            some = layers[begin : begin + together]
            stack = GroupedGradientStack(len(some), rows, shape, dtype, biased, tokens if gathers else None)
            slots |= zip(some, stack.slots(), strict=True)
    return slots


def routed_sums(model: nn.Module) -> dict[nn.Module, Sums]:
    """Where the gradients of routers, and of the biases of attention banks, are summed: those of one shape together."""
    alike: dict[Any, list[nn.Module]] = {}
    projections = {module.router for module in model.modules() if isinstance(module, ExpertProjection)}
    for module in model.modules():
        if isinstance(module, TopKRouter):  # those of projections read no norm, and sum less
            alike.setdefault((module in projections, module.scores.weight.shape), []).append(module)
    for bank in _attention_banks(model):
        alike.setdefault((bank.heads, bank.qkv.weight.shape), []).append(bank.qkv)
    return {part: sums for parts in alike.values() for sums in [Sums(len(parts))] for part in parts}


def read_narrow(model: nn.Module) -> list[Tensor]:
    """The matrices of banks that are read as they are."""
    read: list[Any] = []
    for module in model.modules():
        if isinstance(module, ParallelLayer) and module.stack is not None:
            block: Any = module.stack[0]
            read += [block.attention.out.weight, block.feed.out.weight]
        elif isinstance(module, RoutedAttention):
            read.append(module.bank.out.weight)
        elif isinstance(module, RoutedFeed):
            read += [into_feed(module.bank).weight, module.bank.out.weight]
        elif isinstance(module, ExpertProjection):
            read += [layer.weight for layer in (module.gate_up, module.out) if layer is not None]
    return read
