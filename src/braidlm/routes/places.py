"""Where in a model something is chosen for each token: joins of paths, and routers of paths or experts."""

import re
from collections.abc import Sequence

from torch import nn

from braidlm.core.errors import BraidError
from braidlm.model.paths.joins import Join
from braidlm.model.paths.routed_join import Routed
from braidlm.model.routing.router import TopKRouter

Chooser = Join | TopKRouter
"""What chooses. A routed join is its router: it decides before anything is joined."""


def choosers_of(model: nn.Module) -> list[Chooser]:
    """All that choose, in the order of the model's stages, or an error if nothing does."""
    found: list[Chooser] = [
        module
        for module in model.modules()
        if isinstance(module, TopKRouter) or (isinstance(module, Join) and not isinstance(module, Routed))
    ]
    if not found:
        raise BraidError(
            "this model has no parallel stage and no experts; there is nothing to choose between",
            todo="Give a model with some: `braid compose A B --out M`, or a recipe with a `parallel` stage or experts.",
        )
    return found


def silent_paths(model: nn.Module) -> set[str]:
    """The paths that are not heard."""
    return set().union(*(chooser.silent for chooser in choosers_of(model)))


def labels(addresses: Sequence[str]) -> list[str]:
    """Short names: `layer 1`, `projection 1`, counted over the whole model; then which part of the layer chooses."""
    numbers: dict[str, dict[str, int]] = {"layer": {}, "projection": {}}
    made = []
    for address in addresses:
        layer = re.match(r"stages\.\d+\.layers\.\d+", address)
        kind, place = ("layer", layer[0]) if layer else ("projection", address)
        number = numbers[kind].setdefault(place, len(numbers[kind]) + 1)
        made.append(" ".join([kind, str(number), *_parts(address.removeprefix(place))]))
    return made


def _parts(inside: str) -> list[str]:
    """What tells the choosers of one layer apart: a path, its later blocks by number, attention or feed-forward."""
    words = [word for word in inside.split(".") if word not in ("", "paths", "join", "router", "0")]
    return [str(int(word) + 1) if word.isdecimal() else word for word in words]
