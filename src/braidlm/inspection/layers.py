"""The layers of a model in which something is chosen for each token, and how each choice can be read.

A router's choice is read from the routing that the model returns. For a join without a router, the path is named whose
output is closest, in cosine, to the joined output (PaPaformer, section 5.4.1). A head that weighs whole models anew for
every token is read by their shares.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.model.layer_skip import layers_of
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.average import AverageHead
from braidlm.model.paths.joins import Join
from braidlm.model.paths.routed_join import Routed
from braidlm.model.paths.switches import path_names
from braidlm.model.routing.router import TopKRouter

RoutingModule = Join | TopKRouter
"""A module that chooses. A routed join is represented by its router, which decides before anything is joined."""


@dataclass(frozen=True)
class Layer:
    """A join or router whose tokens take one or some of several paths or experts."""

    name: str
    """The address of the join or router, e.g. `stages.2.layers.0.join`."""
    label: str
    """Short: `layer 1`, counted over the whole model."""
    choices: tuple[str, ...]
    """The names to choose from: paths and, with Gumbel joins, their combination; or experts."""
    read_by: str
    """`router`, `cosine`, `shares`, or nothing where the choice cannot be read."""
    note: str = ""
    """Why the choice cannot be read."""
    top_k: int = 1
    """How many choices a token takes."""
    of_paths: bool = True
    """Whether the choices are paths, and not experts."""
    inactive: tuple[str, ...] = ()
    """Choices that are switched off."""

    @property
    def part(self) -> str:
        """The part of a layer that chooses, the same in all layers alike: `feed`, `attention`, or nothing."""
        return " ".join(self.label.split()[2:])

    @property
    def active(self) -> list[str]:
        """The choices that can be taken."""
        return [name for name in self.choices if name not in self.inactive]


def routing_modules(model: nn.Module) -> list[RoutingModule]:
    """All modules that choose, in the order of the model's stages."""
    return [
        module
        for module in model.modules()
        if isinstance(module, TopKRouter) or (isinstance(module, Join) and not isinstance(module, Routed))
    ]


class NothingToSee(BraidError):
    """A model has neither paths nor experts nor gates."""


def no_choices(where: str | None = None) -> NothingToSee:
    """The error for a model that chooses nothing."""
    return NothingToSee(
        "this model has no parallel stage and no experts; there is nothing to choose between",
        where,
        "Give a model with some: `braid compose A B --out M`, or a recipe with a `parallel` stage or experts.",
    )


def layer_labels(addresses: Sequence[str], depths: Sequence[int]) -> list[str]:
    """Short names: `layer 7`, counted over the layers of all stages, of which there are `depths`, and `projection 1`,
    counted over those that choose; then which part of the layer chooses.
    """
    projections: list[str] = []
    labels = []
    for address in addresses:
        if layer := re.match(r"stages\.(\d+)\.layers\.(\d+)", address):
            kind, number, prefix = "layer", sum(depths[: int(layer[1])]) + int(layer[2]) + 1, layer[0]
        else:
            projections.append(address)
            kind, number, prefix = "projection", len(projections), address
        labels.append(" ".join([kind, str(number), *_parts(address.removeprefix(prefix))]))
    return labels


def _parts(inside: str) -> list[str]:
    """The part of a layer that chooses: a path, its later blocks by number, attention or feed-forward."""
    words = [word for word in inside.split(".") if word not in ("", "paths", "join", "router", "block", "0")]
    return [str(int(word) + 1) if word.isdecimal() else word for word in words]


JoinRecords = dict[str, tuple[list[Tensor], Tensor]]
"""By a join's address: the outputs of its paths, and the joined output."""


@contextmanager
def record_joins(joins: Iterable[Join]) -> Iterator[JoinRecords]:
    """Record inputs and outputs of joins; the hooks are removed whatever happens inside the block."""
    records: JoinRecords = {}

    def hook(join: Any, inputs: tuple, outputs: tuple) -> None:
        records[join.address] = (inputs[0], outputs[0])

    handles = []
    try:
        for join in joins:
            handles.append(join.register_forward_hook(hook))
        yield records
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def find_layers(model: BraidForCausalLM) -> list[Layer]:
    """The layers of a model in which something is chosen, as a pass over a single token shows them."""
    modules = routing_modules(model)
    if not modules:
        raise no_choices()
    with record_joins(module for module in modules if isinstance(module, Join)) as records:
        body = model.model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    routings = {routing.name: routing for routing in body.routings or ()}
    paths = set(path_names(model))
    layers = []
    depths = [len(layers_of(stage)) for stage in model.model.stages]
    for label, module in zip(layer_labels([module.address for module in modules], depths), modules, strict=True):
        name, off = module.address, tuple(sorted(module.inactive))
        if isinstance(module, TopKRouter):
            of_paths = bool(paths.intersection(module.choices))
            top_k = module.config.top_k
            layers.append(Layer(name, label, module.choices, "router", "", top_k, of_paths, off))
        elif name in routings:
            layers.append(Layer(name, label, routings[name].choices, "router", inactive=off))
        else:
            note = _no_cosine(module, *records[name])
            layers.append(Layer(name, label, module.names, "" if note else "cosine", note, inactive=off))
    if weighs_tokens(model):
        # Whole models meet in the head alone: where nothing is joined there is nothing to read.
        off = tuple(name for index, name in enumerate(model.head.names) if index not in model.head.active)
        readable = [layer for layer in layers if layer.read_by]
        layers = [*readable, Layer("head", "head", model.head.names, "shares", inactive=off)]
    if not any(layer.read_by for layer in layers):
        raise BraidError(
            "which path is taken cannot be read in any layer: "
            + "; ".join(f"{layer.name}: {layer.note}" for layer in layers),
            todo="It is seen where a join has a router (`braid compose --join gumbel_v1`) or paths of its width, and "
            "where a head weighs whole models anew for every token (`--join posterior`).",
        )
    return layers


def weighs_tokens(model: BraidForCausalLM) -> bool:
    """Whether the head weighs paths anew for every token."""
    return isinstance(model.head, AverageHead) and model.head.weighs_tokens


def _no_cosine(join: Join, outputs: list[Tensor], joined: Tensor) -> str:
    """Why the outputs of paths cannot be compared with the joined output; empty when they can."""
    active = [x.shape[-1] for name, x in zip(join.names, outputs, strict=True) if name not in join.inactive]
    if all(width == joined.shape[-1] for width in active):
        return ""
    widths = " and ".join(map(str, sorted(set(active))))
    return f"it has no router, and its paths ({widths} wide) cannot be compared with its output ({joined.shape[-1]})"
