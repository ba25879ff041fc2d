"""Switches on an existing model: active paths and modules that are switched off, by name."""

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

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


def switch_off_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Let routers choose none of these modules (experts), and all others again.

    A name is that of a module or a pattern, in every layer or, after a colon, in a part of the model: `german*`,
    `stages.0.layers.3:expert_2`. The weight of what is off goes to the others, in proportion to their own.
    """
    of_paths = {router for part in _with_paths(model) for router in part.path_routers()}
    routers = [m for m in model.modules() if isinstance(m, TopKRouter) and m not in of_paths]
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
