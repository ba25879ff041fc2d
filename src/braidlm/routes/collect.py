"""One pass over texts: which path each token took in each parallel layer.

Where a join has a router, its choice is read from the routing that the model returns. Where it has none, the path is
named whose output is closest, in cosine, to what the join made of all of them (PaPaformer, section 5.4.1).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.model.joins import Join
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.routes.texts import Text

UNREAD = -1
"""Stands for the choice in a layer that cannot be read."""


@dataclass(frozen=True)
class Layer:
    """A place where paths become one stream, and how one can tell which was taken."""

    name: str
    """The join's address, e.g. `stages.2.layers.0.join`."""
    label: str
    """Short: `layer 1`, counted over the whole model."""
    choices: tuple[str, ...]
    """What there is to take: the paths and, with Gumbel joins, their combination."""
    how: str
    """`router`, `cosine`, or nothing where it cannot be told."""
    note: str = ""
    """Why it cannot be told."""


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


def joins_of(model: nn.Module) -> list[Join]:
    """The joins of a model in the order of its stages, or an error if it has none."""
    found = [module for module in model.modules() if isinstance(module, Join)]
    if not found:
        raise BraidError(
            "this model has no parallel stage; there are no paths to choose between",
            todo="Give a model with paths: `braid compose A B --out M`, or a recipe with a `parallel` stage.",
        )
    return found


@torch.no_grad()
def find_layers(model: BraidForCausalLM) -> list[Layer]:
    """The parallel layers of a model, as a pass over a single token shows them."""
    joins = joins_of(model)
    with watching(joins) as seen:
        body = model.model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    routers = {routing.name: routing for routing in body.routings or ()}
    layers = []
    for number, join in enumerate(joins, 1):
        if join.address in routers:
            choices, how, note = routers[join.address].choices, "router", ""
        else:
            choices, note = join.names, _no_cosine(join, *seen[join.address])
            how = "" if note else "cosine"
        layers.append(Layer(join.address, f"layer {number}", choices, how, note))
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
) -> list[np.ndarray]:
    """For each text [layers, tokens]: the index of the choice. Texts beyond the context are read in windows of it."""
    size = model.config.max_position_embeddings
    windows = [(n, at) for n, text in enumerate(texts) for at in range(0, len(text.ids), size)]
    # Windows of like length stand together, so that little is padding; it is never counted.
    windows.sort(key=lambda window: len(texts[window[0]].ids) - window[1])
    found = [np.full((len(layers), len(text.ids)), UNREAD, np.int16) for text in texts]
    unrouted = {layer.name for layer in layers if layer.how == "cosine"}
    done = 0
    with watching(join for join in joins_of(model) if join.address in unrouted) as seen:
        for begin in range(0, len(windows), batch):
            part = windows[begin : begin + batch]
            rows = [texts[n].ids[at : at + size] for n, at in part]
            chosen_LBT = _choices(model, layers, rows, seen)
            for row, (n, at) in enumerate(part):
                found[n][:, at : at + size] = chosen_LBT[:, row, : len(rows[row])]
            done += sum(map(len, rows))
            if advance is not None:
                advance(done, "")
    return found


def _choices(
    model: BraidForCausalLM, layers: Sequence[Layer], rows: Sequence[Sequence[int]], seen: Watched
) -> np.ndarray:
    """[layers, rows, time] for one batch; what stands beyond a row's end means nothing."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)
    real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    body = model.model(ids, attention_mask=real, use_cache=False)
    routings = {routing.name: routing for routing in body.routings or ()}
    joins = {join.address: join for join in joins_of(model)}
    made = []
    for layer in layers:
        if layer.how == "router":
            made.append(routings[layer.name].main_BT)
        elif layer.how == "cosine":
            silent = joins[layer.name].silent
            heard = [n for n, name in enumerate(layer.choices) if name not in silent]
            made.append(closest_path(*seen[layer.name], heard))
        else:
            made.append(torch.full_like(ids, UNREAD))
    return torch.stack(made).to(torch.int16).cpu().numpy()
