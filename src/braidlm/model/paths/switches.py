"""Switches on an existing model, by name: active paths, modules that are switched off, and frozen parts."""

import re
from collections.abc import Container, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn

from ..errors import BraidError, did_you_mean
from ..routing.router import TopKRouter


def path_names(model: nn.Module) -> tuple[str, ...]:
    """The names of all paths of a model, each once."""
    return tuple(dict.fromkeys(name for part in _with_paths(model) for name in part.names))


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
    for part in _with_paths(model):
        part.use_paths(frozenset(active))


def module_routers(model: nn.Module) -> list[TopKRouter]:
    """The routers that choose among modules (experts), and not among paths."""
    of_paths = {router for part in _with_paths(model) for router in part.path_routers()}
    return [m for m in model.modules() if isinstance(m, TopKRouter) and m not in of_paths]


def switch_off_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Let routers choose none of these modules (experts), and all others again. A name is that of a module or a
    pattern, in every layer or, after a colon, in a part of the model: `german*`, `stages.0.layers.3:expert_2`. The
    weight of what is off goes to the others, in proportion to their own."""
    routers = module_routers(model)
    off: dict[TopKRouter, set[str]] = {router: set() for router in routers}
    parts = [router.address.removesuffix(".router") for router in routers]
    for name in names:
        part, _, pattern = name.rpartition(":")
        within = f"{part.removeprefix('model.')}.*" if part else "*"
        inside = [router for router in routers if fnmatchcase(f"{router.address}.", within)]
        known = {choice for router in inside for choice in router.choices}
        chosen = {choice for choice in known if fnmatchcase(choice, pattern)}
        if not routers:
            paths = path_names(model)
            todo = f"Its paths are {', '.join(paths)}: `--paths` names those to use." if paths else None
            raise BraidError("this model has no modules (experts)", todo=todo)
        if not inside:
            raise BraidError(f"the model has no part '{part}' with modules.{did_you_mean(part, parts)}", name)
        if not chosen:
            raise BraidError(f"the model has no module '{pattern}'.{did_you_mean(pattern, known)}", part or None)
        for router in inside:
            off[router] |= chosen.intersection(router.choices)
    for part, router in zip(parts, routers, strict=True):
        if len(off[router]) == len(router.choices):
            raise BraidError("this switches off every module there", part, "Leave at least one of them.")
    for router, inactive in off.items():
        router.inactive = frozenset(inactive)


def address_outside_stack(name: str) -> str:
    """A module's name; that of a router in a stack of paths is the one it has with a module for each path."""
    return re.sub(r"\.stack\.(\d+\.\w+)\.(?:router\.)?([^.]+)(?:\.router)?$", r".paths.\2.\1.router", name)


def _with_paths(model: nn.Module) -> Iterator[Any]:
    """Stages, and a head of paths."""
    return (module for module in model.modules() if hasattr(module, "use_paths"))


Freezable = Literal["paths", "joins", "blocks", "modules", "routers", "embedding", "head"]
FREEZABLE: tuple[str, ...] = get_args(Freezable)


def freeze(model: nn.Module, parts: Iterable[str]) -> None:
    """Exclude these parts, of those in FREEZABLE, from training.

    `joins` includes projections and the last norm and, if attention and feed-forward are routed separately, their
    routers and norms; `blocks` is all that is between embedding and head, but for routers and for modules that were
    inserted, which are `modules`; `routers` are those among experts, but for their rows of inserted modules unless
    these are frozen too; `embedding` includes learned positions. Paths that are averaged include their norms and their
    parts of the head.
    """
    frozen = frozenset(parts)
    for part in sorted(frozen):
        if part not in FREEZABLE:
            raise BraidError(f"'{part}' cannot be frozen.{did_you_mean(part, FREEZABLE)}")
        for content in _contents(model, part, frozen):
            content.requires_grad_(False)


def _contents(model: Any, part: str, frozen: frozenset[str]) -> Iterator[nn.Module | nn.Parameter]:
    """What is frozen whole of a part, where all of these are; of banks and routers that are partly frozen, the rows
    that training changes are set."""
    body = getattr(model, "model", model)
    split = [m for m in (*body.stages, body.norm, getattr(model, "head", None)) if hasattr(m, "paths_and_joins")]
    if part == "paths":
        yield from (path for one in split for path in one.paths_and_joins()[0])
    elif part == "joins":
        yield from (join for one in split for join in one.paths_and_joins()[1])
        yield from () if body.norm in split else (body.norm,)
    elif part == "blocks":
        grown = {} if "modules" in frozen else dict(_grown_banks(body.stages))
        for layer, router in grown.items():
            _train_only(layer, slice(router.old, len(router.choices)))
        yield from _outside_routers(body.stages, grown)
        yield body.norm
    elif part == "modules" and "blocks" not in frozen:
        for layer, router in _grown_banks(body.stages):
            _train_only(layer, slice(0, router.old))
    elif part == "routers":
        for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
            partly = bool(router.config.new) and "modules" not in frozen
            if partly:
                _train_only(router.scores, slice(router.old, len(router.choices)))
            yield from (inner for inner in router.children() if inner is not router.scores or not partly)
    elif part == "embedding":
        yield from (body.embedding, body.positions)
    elif hasattr(model, "head"):  # a classifier has no such head
        yield from model.head.paths_and_joins()[0] if model.head in split else (model.head,)


def _grown_banks(module: nn.Module, router: TopKRouter | None = None) -> Iterator[tuple[nn.Module, TopKRouter]]:
    """The layers with a row for each module of a router into which some were inserted, beside that router."""
    if isinstance(module, TopKRouter):
        return
    own = getattr(module, "router", None)
    router = own if isinstance(own, TopKRouter) and own.config.new else router
    if router is not None and getattr(module, "stack", None) is not None:
        yield module, router
    for child in module.children():
        yield from _grown_banks(child, router)


def _outside_routers(module: nn.Module, without: Container[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters that are not a router's, and not of these layers."""
    if isinstance(module, TopKRouter):
        return
    yield from () if module in without else module.parameters(recurse=False)
    for child in module.children():
        yield from _outside_routers(child, without)


def _train_only(module: nn.Module, rows: slice) -> None:
    if hasattr(module, "trained_rows"):
        module.trained_rows = rows  # type: ignore[assignment]
    elif next(module.parameters(recurse=False), None) is not None:
        raise BraidError(f"{type(module).__name__} cannot freeze some of its members and train others")
