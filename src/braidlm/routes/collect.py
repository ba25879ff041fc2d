"""One pass over texts: what each token took in each place where something is chosen.

Where there is a router, its choice is read from the routing that the model returns. Where a join has none, the path is
named whose output is closest, in cosine, to what the join made of all of them (PaPaformer, section 5.4.1).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from braidlm.core.errors import BraidError
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.joins import Join
from braidlm.model.paths.switches import path_names
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routing
from braidlm.routes.places import choosers_of, labels
from braidlm.routes.texts import Text

UNREAD = -1
"""Stands for the choice in a layer that cannot be read, and where fewer are taken than elsewhere."""


@dataclass(frozen=True)
class Layer:
    """A place where tokens take one or some of several paths or experts, and how one can tell which."""

    name: str
    """The address of the join or router, e.g. `stages.2.layers.0.join`."""
    label: str
    """Short: `layer 1`, counted over the whole model."""
    choices: tuple[str, ...]
    """What there is to take: paths and, with Gumbel joins, their combination; or experts."""
    how: str
    """`router`, `cosine`, or nothing where it cannot be told."""
    note: str = ""
    """Why it cannot be told."""
    top_k: int = 1
    """How many serve a token."""
    of_paths: bool = True
    """Whether paths are chosen between, and not experts."""


@dataclass(frozen=True)
class Taken:
    """What the tokens of one text took. Shapes: L layers, K the most that a layer takes, T tokens."""

    picks_LKT: np.ndarray
    """Indices of choices, the one that counts most first; UNREAD where there is none."""
    weights_LKT: np.ndarray
    """What each of them counts for its token; 0 where there is none."""

    @classmethod
    def empty(cls, layers: Sequence[Layer], tokens: int) -> "Taken":
        """Nothing taken yet."""
        shape = (len(layers), max(layer.top_k for layer in layers), tokens)
        return cls(np.full(shape, UNREAD, np.int16), np.zeros(shape, np.float32))

    @classmethod
    def of_one_each(cls, choices_LT: np.ndarray) -> "Taken":
        """Every token takes one choice in each layer."""
        return cls(choices_LT[:, None], (choices_LT[:, None] != UNREAD).astype(np.float32))

    @property
    def main_LT(self) -> np.ndarray:
        """The choice that counts most."""
        return self.picks_LKT[:, 0]

    def part(self, tokens: slice) -> "Taken":
        """Of some of the tokens."""
        return Taken(self.picks_LKT[..., tokens], self.weights_LKT[..., tokens])


Watched = dict[str, tuple[list[Tensor], Tensor]]
"""By a join's address: what its paths gave it, and what it made of that."""


@contextmanager
def watching(joins: Iterable[Join]) -> Iterator[Watched]:
    """See what passes through joins; nothing stays on the model, whatever happens inside the block."""
    seen: Watched = {}

    def note(join: Any, inputs: tuple, made: tuple) -> None:
        seen[join.address] = (inputs[0], made[0])

    handles = []
    try:
        for join in joins:
            handles.append(join.register_forward_hook(note))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def find_layers(model: BraidForCausalLM) -> list[Layer]:
    """Where something is chosen in a model, as a pass over a single token shows it."""
    choosers = choosers_of(model)
    with watching(chooser for chooser in choosers if isinstance(chooser, Join)) as seen:
        body = model.model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    routings = {routing.name: routing for routing in body.routings or ()}
    paths = set(path_names(model))
    layers = []
    for label, chooser in zip(labels([chooser.address for chooser in choosers]), choosers, strict=True):
        name = chooser.address
        if isinstance(chooser, TopKRouter):
            of_paths = bool(paths.intersection(chooser.choices))
            top_k = chooser.config.top_k
            layers.append(Layer(name, label, chooser.choices, "router", top_k=top_k, of_paths=of_paths))
        elif name in routings:
            layers.append(Layer(name, label, routings[name].choices, "router"))
        else:
            note = _no_cosine(chooser, *seen[name])
            layers.append(Layer(name, label, chooser.names, "" if note else "cosine", note))
    if not any(layer.how for layer in layers):
        raise BraidError(
            "which path is taken cannot be told in any layer: "
            + "; ".join(f"{layer.name}: {layer.note}" for layer in layers)
        )
    return layers


def _no_cosine(join: Join, outputs: list[Tensor], joined: Tensor) -> str:
    """Why paths cannot be compared with what a join made of them; empty when they can."""
    heard = [x.shape[-1] for name, x in zip(join.names, outputs, strict=True) if name not in join.silent]
    if all(width == joined.shape[-1] for width in heard):
        return ""
    widths = " and ".join(map(str, sorted(set(heard))))
    return f"it has no router, and its paths ({widths} wide) cannot be compared with its output ({joined.shape[-1]})"


def closest_path(outputs: Sequence[Tensor], joined: Tensor, heard: Sequence[int]) -> Tensor:
    """For each token, which of the `heard` paths' outputs points most the way of the joined output, [B, T]."""
    to = joined.float()
    cosines = torch.stack([torch.cosine_similarity(outputs[n].float(), to, dim=-1) for n in heard], dim=-1)
    return torch.tensor(heard, device=joined.device)[cosines.argmax(-1)]


@torch.no_grad()
def collect_choices(
    model: BraidForCausalLM,
    layers: Sequence[Layer],
    texts: Sequence[Text],
    batch: int = 16,
    advance: Callable[[float, str], None] | None = None,
) -> list[Taken]:
    """What each text's tokens took. Texts beyond the context are read in windows of it."""
    size = model.config.max_position_embeddings
    windows = [(n, at) for n, text in enumerate(texts) for at in range(0, len(text.ids), size)]
    # Windows of like length stand together, so that little is padding; it is never counted.
    windows.sort(key=lambda window: len(texts[window[0]].ids) - window[1])
    found = [Taken.empty(layers, len(text.ids)) for text in texts]
    unrouted = {layer.name for layer in layers if layer.how == "cosine"}
    joins = {c.address: c for c in choosers_of(model) if isinstance(c, Join) and c.address in unrouted}
    done = 0
    with watching(joins.values()) as seen:
        for begin in range(0, len(windows), batch):
            part = windows[begin : begin + batch]
            rows = [texts[n].ids[at : at + size] for n, at in part]
            routings = _run(model, rows)
            for index, layer in enumerate(layers):
                if not layer.how:
                    continue
                picks_BTK, weights_BTK = _taken(layer, routings, joins, seen)
                for row, (n, at) in enumerate(part):
                    here = (index, slice(layer.top_k), slice(at, at + len(rows[row])))
                    found[n].picks_LKT[here] = picks_BTK[row, : len(rows[row])].T
                    found[n].weights_LKT[here] = weights_BTK[row, : len(rows[row])].T
            done += sum(map(len, rows))
            if advance is not None:
                advance(done, "")
    return found


def _run(model: BraidForCausalLM, rows: Sequence[Sequence[int]]) -> dict[str, Routing]:
    """The routings of one batch by their names; what stands beyond a row's end means nothing."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)
    real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    body = model.model(ids, attention_mask=real, use_cache=False)
    return {routing.name: routing for routing in body.routings or ()}


def _taken(
    layer: Layer, routings: dict[str, Routing], joins: dict[str, Join], seen: Watched
) -> tuple[np.ndarray, np.ndarray]:
    """Picks and weights [B, T, K] in one layer, those that count most first."""
    if layer.how == "cosine":
        silent = joins[layer.name].silent
        heard = [n for n, name in enumerate(layer.choices) if name not in silent]
        return _one_each(closest_path(*seen[layer.name], heard))
    routing = routings[layer.name]
    if layer.top_k == 1:
        return _one_each(routing.main_BT)
    weights_BTK, order_BTK = routing.weights_BTK.sort(dim=-1, descending=True, stable=True)
    picks_BTK = routing.chosen_BTK.gather(-1, order_BTK)
    # Where fewer than top_k are heard, the others are picked with no weight.
    picks_BTK = picks_BTK.masked_fill(weights_BTK == 0, UNREAD)
    return picks_BTK.cpu().numpy(), weights_BTK.float().cpu().numpy()


def _one_each(choice_BT: Tensor) -> tuple[np.ndarray, np.ndarray]:
    picks_BTK = choice_BT[..., None].cpu().numpy()
    return picks_BTK, np.ones(picks_BTK.shape, np.float32)
