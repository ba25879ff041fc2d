"""What each token of one text chooses in every layer of a model, and how much each gate adds to it.

The choices are those that `braid routes` reports; of an average, each member's share is told too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from braidlm.core.errors import BraidError
from braidlm.inspection.gates import gate_passes
from braidlm.inspection.layers import (
    Layer,
    Members,
    TokenChoices,
    choosing_layers,
    collect_choices,
    log_shares,
    members_of,
)
from braidlm.inspection.texts import Text
from braidlm.model.members import MembersForCausalLM
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.gating import gates_of

DIGITS = 4
"""Weights are rounded to so many decimals."""
MAX_WEIGHTS = 1_000_000
"""The most weights of an answer, over all tokens and layers."""


@dataclass(frozen=True)
class LayerRouting:
    """One layer, and what each token of a text chooses there."""

    name: str
    """The address of the join, router, head or gate in the model."""
    label: str
    """`layer 3 feed`, counted over the whole model."""
    kind: str
    """paths, experts, attention experts, projection experts, members, depth, or gates."""
    choices: list[str]
    weights: list[list[float]]
    """For each token the weight of each choice. Of members, their shares of the prediction after the token; of a gate,
    the norm of what it adds as a share of the norm of the layer's output; of a join without a router, 1 for the path
    whose output is nearest to the joined one."""
    chosen: list[list[int]]
    """For each token the indices of the choices that serve it, the one with the largest weight first."""
    __pydantic_config__ = {"use_attribute_docstrings": True}  # for the schema of the server


def gate_name(layer: int) -> str:
    """What the gate of a layer, counted from 1, is called where gates are listed or switched off."""
    return f"layer {layer}"


@torch.no_grad()
def token_routings(model: Any, ids: Sequence[int]) -> list[LayerRouting]:
    """All layers of a model, Braid's or transformers', in which something happens to some tokens and not to others.

    A text longer than the model's context is read in windows of it.
    """
    routings: list[LayerRouting] = []
    if isinstance(model, (BraidForCausalLM, MembersForCausalLM)):
        layers = [layer for layer in choosing_layers(model) if layer.read_by]
        if (size := sum(len(layer.choices) for layer in layers)) * len(ids) > MAX_WEIGHTS:
            what = f"the text has {len(ids):,} tokens; with {size:,} choices in all layers at most"
            raise BraidError(f"{what} {MAX_WEIGHTS // size:,} are looked at", todo="Give a shorter text.")
        if layers:
            (choices,) = collect_choices(model, layers, [Text("", None, ids)])
            routings = [_routing(layer, choices, n) for n, layer in enumerate(layers) if layer.kind != "members"]
        if (members := members_of(model)) is not None:
            routings.append(_shares(model, members, ids))
    return [*routings, *_gates(model, ids)]


def _routing(layer: Layer, choices: TokenChoices, at: int) -> LayerRouting:
    by_token, size = choices.by_token(at), len(layer.choices)
    weights = [[round(by_choice.get(n, 0.0), DIGITS) for n in range(size)] for by_choice in by_token]
    return LayerRouting(layer.name, layer.label, layer.kind, list(layer.choices), weights, list(map(list, by_token)))


def _shares(model: Any, members: Members, ids: Sequence[int]) -> LayerRouting:
    """The share of each member in what is predicted after each token; windows begin anew, as in `collect_choices`."""
    rows = []
    for window in torch.tensor(ids, device=model.device).split(model.config.max_position_embeddings or len(ids)):
        active = log_shares(model, window[None])[0].exp().float()
        rows.append(active.new_zeros(len(window), len(members.names)))  # members that are switched off have no share
        rows[-1][:, members.active] = active
    shares_TN = torch.cat(rows)
    # The stable order of equal shares is that of the members.
    order = shares_TN.argsort(dim=-1, descending=True, stable=True).tolist()
    top = 1 if members.weighs_tokens else len(members.active)
    weights = [[round(share, DIGITS) for share in row] for row in shares_TN.tolist()]
    return LayerRouting("head", "head", "members", list(members.names), weights, [row[:top] for row in order])


def _gates(model: Any, ids: Sequence[int]) -> list[LayerRouting]:
    """How much each gate adds to each token: a share of the layer's output, by their norms."""
    if not gates_of(model):
        return []
    shares: dict[int, list[float]] = {}
    for _, _, mask, layers in gate_passes(model, [ids]):
        for number, layer in layers.items():
            shares.setdefault(number, []).extend(layer.share[mask.bool().to(layer.plain.device)].tolist())
    routings = []
    for number, of_tokens in shares.items():
        weights, chosen = [[round(share, DIGITS)] for share in of_tokens], [[0] if share else [] for share in of_tokens]
        routings.append(LayerRouting(f"gate.{number}", gate_name(number), "gates", ["gate"], weights, chosen))
    return routings
