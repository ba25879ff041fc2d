"""The layers of a model in which something is chosen for each token, and what each token of a text chooses there.

A router's choice is read from the routing that the model returns. For a join without a router, the path is named whose
output is closest, in cosine, to the joined output (PaPaformer, section 5.4.1). A head that weighs whole models anew for
every token is read by their shares.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from braidlm.core.errors import BraidError
from braidlm.inspection.texts import ProgressCallback, Text, windows_of
from braidlm.model.language_model import LanguageModel
from braidlm.model.layer_skip import layers_of
from braidlm.model.members import MembersForCausalLM
from braidlm.model.mixture_of_depths import DEPTH_CHOICES
from braidlm.model.paths.average import AverageHead
from braidlm.model.paths.joins import Join
from braidlm.model.paths.routed_join import Routed
from braidlm.model.paths.switches import path_names
from braidlm.model.routing.router import TopKRouter
from braidlm.model.routing.routing import Routing

RoutingModule = Join | TopKRouter
"""A module that chooses. A routed join is represented by its router, which decides before anything is joined."""
NO_CHOICE = -1
"""The index in a layer that cannot be read, where it takes fewer choices than others, and of tokens that pass it by."""


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

    @property
    def part(self) -> str:
        """What chooses in a layer, whatever the layer's number: `feed`, `attention`, or nothing."""
        return " ".join(self.label.split()[2:])

    @property
    def active(self) -> list[str]:
        return [name for name in self.choices if name not in self.inactive]

    @property
    def kind(self) -> str:
        """What is chosen: paths, members of an average, depth, or experts of some kind."""
        if self.read_by == "shares":
            return "members"
        if self.choices == DEPTH_CHOICES:
            return "depth"
        if self.of_paths:
            return "paths"
        kinds = {"projection": "projection experts", "attention": "attention experts"}
        return next((kind for word, kind in kinds.items() if word in self.label.split()), "experts")


def routing_modules(model: nn.Module) -> list[RoutingModule]:
    """All modules that choose, in the order of the model's stages."""
    return [m for m in model.modules() if isinstance(m, RoutingModule) and not isinstance(m, Routed)]


def no_choices(where: str | None = None) -> BraidError:
    what = "this model has no parallel stage and no experts; there is nothing to choose between"
    todo = "Give a model with some: `braid compose A B --out M`, or a recipe with a `parallel` stage or experts."
    return BraidError(what, where, todo)


K = TypeVar("K")


@contextmanager
def record_calls(modules: Mapping[K, nn.Module]) -> Iterator[dict[K, tuple[tuple, Any]]]:
    """The inputs and the output of each module's latest call; hooks are removed whatever happens inside the block."""
    records: dict[K, tuple[tuple, Any]] = {}

    def record(key: K, _: nn.Module, inputs: tuple, output: Any) -> None:
        records[key] = inputs, output

    with ExitStack() as hooks:
        for key, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(record, key)))
        yield records


def find_layers(model: LanguageModel | MembersForCausalLM) -> list[Layer]:
    """The layers of a model in which something is chosen; an error where there are none, or none can be read."""
    layers = choosing_layers(model)
    if not layers:
        raise no_choices()
    if not any(layer.read_by for layer in layers):
        reasons = "; ".join(f"{layer.name}: {layer.note}" for layer in layers)
        todo = "It is seen where a join has a router (`braid compose --join gumbel_v1`) or paths of its width, and "
        todo += "where a head weighs whole models anew for every token (`--join posterior`)."
        raise BraidError(f"which path is taken cannot be read in any layer: {reasons}", todo=todo)
    return layers


@dataclass(frozen=True)
class Members:
    """The whole models whose probabilities a model averages."""

    names: tuple[str, ...]
    active: list[int]
    """Indices of those that are not switched off."""
    weighs_tokens: bool
    """Whether their shares are others after every token."""


def members_of(model: LanguageModel | MembersForCausalLM) -> Members | None:
    """The members of a model, Braid's or of decoders of transformers, or None where nothing is averaged."""
    if isinstance(model, MembersForCausalLM):
        active = [model.names.index(name) for name in model.active]
        return Members(model.names, active, model.config.judged)
    head = model.head
    return Members(head.names, list(head.active), head.weighs_tokens) if isinstance(head, AverageHead) else None


def log_shares(
    model: LanguageModel | MembersForCausalLM, ids: Tensor, mask: Tensor | None = None, read: Any = None
) -> Tensor:
    """The logarithm of each active member's share of what is predicted after each token, [batch, time, member].

    `read` is what `run` of a model of Braid's gives for these tokens, where it has run already.
    """
    if isinstance(model, MembersForCausalLM):
        shares = model.log_shares(ids, mask)
    else:
        read = read or model.run(ids, attention_mask=mask)
        shares = model.head.log_weights(read.hidden, **read.read)
    return shares.expand(*ids.shape, -1)


@torch.no_grad()
def choosing_layers(model: LanguageModel | MembersForCausalLM) -> list[Layer]:
    """The layers of a model in which something is chosen, as a pass over a single token shows them."""
    members, layers = members_of(model), _routing_layers(model)
    if members is None or not members.weighs_tokens:
        return layers
    # Whole models meet in the head alone: where nothing is joined there is nothing to read.
    off = tuple(name for index, name in enumerate(members.names) if index not in members.active)
    return [*(layer for layer in layers if layer.read_by), Layer("head", "head", members.names, "shares", inactive=off)]


def _routing_layers(model: Any) -> list[Layer]:
    """The joins and routers of a model."""
    modules = routing_modules(model)
    if not modules:
        return []
    with record_calls({module.address: module for module in modules if isinstance(module, Join)}) as records:
        body = model.model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    routings = {routing.name: routing for routing in body.routings or ()}
    paths = set(path_names(model))
    layers: list[Layer] = []
    for module, label in zip(modules, short_labels(model, modules), strict=True):
        name, off = module.address, tuple(sorted(module.inactive))
        if isinstance(module, TopKRouter):
            of_paths = bool(paths.intersection(module.choices))
            layers.append(Layer(name, label, module.choices, "router", "", module.config.top_k, of_paths, off))
        elif name in routings:
            layers.append(Layer(name, label, routings[name].choices, "router", inactive=off))
        else:
            (outputs, *_), (joined, *_) = records[name]
            active = {x.shape[-1] for part, x in zip(module.names, outputs, strict=True) if part not in off}
            widths = " and ".join(map(str, sorted(active)))
            note = f"its paths ({widths} wide) cannot be compared with its output ({joined.shape[-1]})"
            note = "" if active <= {joined.shape[-1]} else f"it has no router, and {note}"
            layers.append(Layer(name, label, module.names, "" if note else "cosine", note, inactive=off))
    return layers


def short_labels(model: LanguageModel, modules: Sequence[RoutingModule]) -> Iterator[str]:
    """What the layer of each module that chooses is called for short, counted over the whole model."""
    depths = [len(layers_of(stage)) for stage in model.model.stages]
    projections = 0
    for module in modules:
        name = module.address
        # `layer 7` is counted over the layers of all stages, `projection 1` over those that choose.
        if layer := re.match(r"stages\.(\d+)\.layers\.(\d+)", name):
            label, prefix = f"layer {sum(depths[: int(layer[1])]) + int(layer[2]) + 1}", layer[0]
        else:
            projections += 1
            label, prefix = f"projection {projections}", name
        # Then follows what chooses: a path, its later blocks by number, attention or feed-forward.
        unsaid = ("", "paths", "join", "router", "block", "0")
        words = [word for word in name.removeprefix(prefix).split(".") if word not in unsaid]
        yield " ".join([label, *(str(int(word) + 1) if word.isdecimal() else word for word in words)])


@dataclass(frozen=True)
class TokenChoices:
    """What the tokens of one text chose. Shapes: L layers, K the largest top_k of any layer, T tokens."""

    chosen_LKT: np.ndarray
    """Indices of choices, the one with the largest weight first; NO_CHOICE where there is none."""
    weights_LKT: np.ndarray
    """The weight of each of them; 0 where there is none."""

    @property
    def main_LT(self) -> np.ndarray:
        """The choice with the largest weight."""
        return self.chosen_LKT[:, 0]

    def by_token(self, layer: int) -> list[dict[int, float]]:
        """For each token the weights of its choices in a layer, the largest first."""
        pairs = zip(self.chosen_LKT[layer].T.tolist(), self.weights_LKT[layer].T.tolist(), strict=True)
        return [{n: weight for n, weight in zip(*pair, strict=True) if n != NO_CHOICE} for pair in pairs]

    def part(self, tokens: slice) -> "TokenChoices":
        """The choices of some of the tokens."""
        return TokenChoices(self.chosen_LKT[..., tokens], self.weights_LKT[..., tokens])


@torch.no_grad()
def collect_choices(
    model: LanguageModel | MembersForCausalLM,
    layers: Sequence[Layer],
    texts: Sequence[Text],
    batch: int = 16,
    advance: ProgressCallback | None = None,
) -> list[TokenChoices]:
    """The choices of each text's tokens. Texts longer than the context are read in windows of it."""
    shapes = [(len(layers), max(layer.top_k for layer in layers), len(text.ids)) for text in texts]
    choices = [TokenChoices(np.full(shape, NO_CHOICE, np.int16), np.zeros(shape, np.float32)) for shape in shapes]
    unrouted = {layer.name for layer in layers if layer.read_by == "cosine"}
    joins = {m.address: m for m in routing_modules(model) if isinstance(m, Join) and m.address in unrouted}
    done = 0
    with record_calls(joins) as records:
        whole = max((len(text.ids) for text in texts), default=1)
        size = model.config.max_position_embeddings or whole  # some decoders have no limit
        for windows in windows_of([text.ids for text in texts], size, batch):
            ids, mask = windows.padded(model.device)
            read = model.run(ids, attention_mask=mask) if isinstance(model, LanguageModel) else None
            routings = {} if read is None else {routing.name: routing for routing in read.routings}
            for index, layer in enumerate(layers):
                if not layer.read_by:
                    continue
                active = [n for n, name in enumerate(layer.choices) if name not in layer.inactive]
                if layer.read_by == "shares":
                    best_BT = log_shares(model, ids, mask, read).argmax(-1)
                    chosen_BTK, weights_BTK = _top_1(torch.tensor(active, device=best_BT.device)[best_BT])
                elif layer.read_by == "cosine":
                    (outputs, *_), (joined, *_) = records[layer.name]
                    chosen_BTK, weights_BTK = _top_1(closest_path(outputs, joined, active))
                else:
                    chosen_BTK, weights_BTK = _routed_choices(routings[layer.name], layer.top_k)
                for row, (n, at, own) in enumerate(zip(windows.texts, windows.starts, windows.rows, strict=True)):
                    here = (index, slice(layer.top_k), slice(at, at + len(own)))
                    choices[n].chosen_LKT[here] = chosen_BTK[row, : len(own)].T
                    choices[n].weights_LKT[here] = weights_BTK[row, : len(own)].T
            done += windows.tokens
            if advance is not None:
                advance(done, "")
    return choices


def closest_path(outputs: Sequence[Tensor], joined: Tensor, active: Sequence[int]) -> Tensor:
    """For each token, which of the `active` paths' outputs has the largest cosine with the joined output, [B, T]."""
    joined = joined.float()
    cosines = torch.stack([torch.cosine_similarity(outputs[n].float(), joined, dim=-1) for n in active], dim=-1)
    return torch.tensor(active, device=joined.device)[cosines.argmax(-1)]


def _routed_choices(routing: Routing, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Choices and weights [B, T, K] of a routing, the largest weight first."""
    if top_k == 1:
        main_BT = routing.main_BT
        return _top_1(main_BT if routing.present_BT is None else main_BT.masked_fill(~routing.present_BT, NO_CHOICE))
    weights_BTK, order_BTK = routing.weights_BTK.sort(dim=-1, descending=True, stable=True)
    if routing.present_BT is not None:
        weights_BTK = weights_BTK * routing.present_BT[..., None]
    # With fewer active paths than top_k, the router fills up with others at weight 0.
    chosen_BTK = routing.chosen_BTK.gather(-1, order_BTK).masked_fill(weights_BTK == 0, NO_CHOICE)
    return chosen_BTK.cpu().numpy(), weights_BTK.float().cpu().numpy()


def _top_1(choice_BT: Tensor) -> tuple[np.ndarray, np.ndarray]:
    chosen_BTK = choice_BT[..., None].cpu().numpy()
    return chosen_BTK, (chosen_BTK != NO_CHOICE).astype(np.float32)
