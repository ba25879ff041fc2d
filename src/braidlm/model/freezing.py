"""Frozen parts, by name: what training does not change. Of a bank with inserted modules only their rows are trained."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from torch import nn

from .errors import BraidError, did_you_mean
from .routing.router import TopKRouter

Freezable = Literal["paths", "joins", "blocks", "routers", "embedding", "head"]
FREEZABLE: tuple[str, ...] = get_args(Freezable)


def freeze(model: nn.Module, parts: Iterable[str]) -> None:
    """Exclude these parts, of those in FREEZABLE, from training.

    `joins` includes projections and the last norm and, if attention and feed-forward are routed separately, their
    routers and norms; `blocks` is all that is between embedding and head, but for routers and for modules that were
    inserted; `routers` are those among experts, but for their rows of inserted modules; `embedding` includes learned
    positions. Paths that are averaged include their norms and their parts of the head.
    """
    for part in parts:
        if part not in FREEZABLE:
            raise BraidError(f"'{part}' cannot be frozen.{did_you_mean(part, FREEZABLE)}")
        for frozen in _contents(model, part):
            frozen.requires_grad_(False)


def _contents(model: Any, part: str) -> Iterator[nn.Module | nn.Parameter]:
    body = getattr(model, "model", model)
    split = [m for m in (*body.stages, body.norm, getattr(model, "head", None)) if hasattr(m, "paths_and_joins")]
    if part == "paths":
        yield from (path for one in split for path in one.paths_and_joins()[0])
    elif part == "joins":
        yield from (join for one in split for join in one.paths_and_joins()[1])
        yield from () if body.norm in split else (body.norm,)
    elif part == "blocks":
        yield from _outside_routers(body.stages)
        yield body.norm
    elif part == "routers":
        yield from (inner for m in model.modules() if isinstance(m, TopKRouter) for inner in _old_parts(m))
    elif part == "embedding":
        yield from (body.embedding, body.positions)
    elif hasattr(model, "head"):  # a classifier has no such head
        yield from model.head.paths_and_joins()[0] if model.head in split else (model.head,)


def _outside_routers(module: nn.Module, inserted: slice | None = None) -> Iterator[nn.Parameter]:
    """The parameters that are not a router's; of a bank into which modules were inserted, only theirs are trained."""
    if isinstance(module, TopKRouter):
        return
    router = getattr(module, "router", None)
    if isinstance(router, TopKRouter) and router.config.new:
        inserted = _inserted(router)
    if inserted is not None and getattr(module, "stack", None) is not None:
        _train_only(module, inserted)
    else:
        yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _outside_routers(child, inserted)


def _old_parts(router: TopKRouter) -> Iterator[nn.Module]:
    for module in router.children():
        if module is router.scores and router.config.new:
            _train_only(module, _inserted(router))
        else:
            yield module


def _inserted(router: TopKRouter) -> slice:
    """The rows of the modules that were inserted."""
    return slice(router.old, len(router.choices))


def _train_only(module: nn.Module, rows: slice) -> None:
    if hasattr(module, "trained_rows"):
        module.trained_rows = rows  # type: ignore[assignment]
    elif next(module.parameters(recurse=False), None) is not None:
        raise BraidError(f"{type(module).__name__} cannot freeze some of its members and train others")
