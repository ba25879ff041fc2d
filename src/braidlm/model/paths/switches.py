"""Switches on an existing model: active paths and frozen parts, by name."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..block import Block
from ..errors import BraidError, did_you_mean
from ..routing.router import TopKRouter
from .joins import Join
from .parallel import ParallelLayer, ParallelStage
from .project import ProjectStage

FREEZABLE = ("paths", "joins", "embedding", "head")


def path_names(model: nn.Module) -> tuple[str, ...]:
    """The names of all paths of a model, each once."""
    return tuple(dict.fromkeys(name for stage in _stages(model) for name in stage.names))


def use_paths(model: nn.Module, names: Iterable[str] | None) -> None:
    """Make only these paths active; None for all. An inactive path adds nothing to the output of its join."""
    known = path_names(model)
    active = set(known if names is None else names)
    if names is not None and not known:
        raise BraidError("this model has no paths to choose from")
    for name in sorted(active - set(known)):
        raise BraidError(f"the model has no path '{name}'.{did_you_mean(name, known)}")
    if known and not active:
        raise BraidError("at least one path must be active", todo=f"The model has {', '.join(known)}.")
    for module in model.modules():
        if isinstance(module, Join):
            module.inactive = frozenset(module.names) - active
        elif isinstance(module, TopKRouter):
            module.inactive = frozenset(module.choices) & (set(known) - active)


def freeze(model: nn.Module, parts: Iterable[str]) -> None:
    """Exclude these parts, of those in FREEZABLE, from training.

    `joins` includes projections and the last norm and, if attention and feed-forward are routed separately, their
    routers and norms; `embedding` includes learned positions.
    """
    for part in parts:
        if part not in FREEZABLE:
            raise BraidError(f"'{part}' cannot be frozen.{did_you_mean(part, FREEZABLE)}")
        for module in _modules_of(model, part):
            module.requires_grad_(False)


def _modules_of(model: Any, part: str) -> Iterator[nn.Module]:
    body = getattr(model, "model", model)
    if part == "paths":
        yield from (part for layer in _layers(model) for part in (layer.stack, layer.paths) if part is not None)
        yield from (part.bank for block in _routed_blocks(model) for part in (block.attention, block.feed))
    elif part == "joins":
        yield from (m for m in model.modules() if isinstance(m, (Join, ProjectStage)))
        yield from (layer.enter for layer in _layers(model) if layer.enter is not None)
        for block in _routed_blocks(model):
            yield from (block.attention.router, block.feed.router, block.attention_norm, block.feed_norm)
        yield body.norm
    elif part == "embedding":
        yield from (body.embedding, body.positions)
    elif hasattr(model, "head"):  # a classifier has no such head
        yield model.head


def _stages(model: nn.Module) -> Iterator[ParallelStage]:
    return (module for module in model.modules() if isinstance(module, ParallelStage))


def _layers(model: nn.Module) -> Iterator[ParallelLayer]:
    return (module for module in model.modules() if isinstance(module, ParallelLayer))


def _routed_blocks(model: nn.Module) -> Iterator[Any]:
    """Blocks whose attention experts and feed-forward experts are the paths."""
    return (layer for stage in _stages(model) for layer in stage.layers if isinstance(layer, Block))
