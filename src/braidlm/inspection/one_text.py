"""One text in a model, token by token: what tokens choose in every layer, and how well each is predicted.

The choices are those that `braid routes` reports; of an average, each member's share is told too. How the prediction
changes is told of a model with parts switched off, or of two models.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from braidlm.core.decoding.generation import token_texts
from braidlm.core.errors import BraidError
from braidlm.core.tokenizer import Tokenizer
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


ROWS = 64
"""Tokens whose distributions are compared at once."""
MAX_NUMBERS = 1 << 26
"""Tokens times vocabulary whose probabilities are in memory at once: 256 MB, twice."""


@dataclass(frozen=True)
class TokenChange:
    """One token of the text; None where nothing precedes the token that could predict it."""

    before: float | None
    """The probability of the token."""
    after: float | None
    rank_before: int | None
    """1 where no other token was more probable."""
    rank_after: int | None
    divergence: float | None
    """The Jensen-Shannon divergence of the two distributions that the token was drawn from, in bits: 0 to 1."""


@dataclass(frozen=True)
class TextChange:
    tokens: list[TokenChange]
    bits_before: float | None
    """Bits per byte of the text, without its first token if nothing precedes it; None where nothing is predicted."""
    bits_after: float | None


def check_size(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a text whose predictions would take too much memory."""
    if len(ids) * vocab_size > MAX_NUMBERS:
        most = MAX_NUMBERS // vocab_size
        what = f"the text has {len(ids):,} tokens; with this vocabulary at most {most:,} are compared"
        raise BraidError(what, todo="Give a shorter text.")


@torch.no_grad()
def predict(model: Any, ids: Sequence[int]) -> Tensor:
    """The log-probabilities [token, vocabulary] of what follows each token but the last, on the CPU."""
    if len(ids) < 2:
        return torch.zeros(0, 1)
    tokens = torch.tensor([list(ids)], device=model.device)
    return model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1).cpu()


def text_change(before_TV: Tensor, after_TV: Tensor, ids: Sequence[int], tokenizer: Tokenizer) -> TextChange:
    """Compare two predictions of the same tokens, which may have different numbers of unused rows at the end."""
    size = max(before_TV.shape[-1], after_TV.shape[-1])
    changes = [TokenChange(None, None, None, None, None)]
    bits = [0.0, 0.0]
    targets = torch.tensor(list(ids[1:]), dtype=torch.long)
    parts = (both.split(ROWS) for both in (before_TV, after_TV, targets))
    for before, after, wanted in zip(*parts, strict=True):
        sides = [pad(side, (0, size - side.shape[-1]), value=-torch.inf) for side in (before, after)]
        actual = [side.gather(-1, wanted[:, None]) for side in sides]
        ranks = [1 + (side > own).sum(-1) for side, own in zip(sides, actual, strict=True)]
        bits = [sum_ - float(own.double().sum()) / math.log(2) for sum_, own in zip(bits, actual, strict=True)]
        columns = (*(own[:, 0].exp() for own in actual), *ranks, divergence(*sides))
        changes += [TokenChange(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    size_in_bytes = len("".join(token_texts(tokenizer, ids)[1:]).encode())
    per_byte = [total / size_in_bytes if size_in_bytes and len(ids) > 1 else None for total in bits]
    return TextChange(changes[: len(ids)], *per_byte)


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of log-probabilities [..., vocabulary], in bits."""
    middle = torch.logaddexp(one, other) - math.log(2)
    halves = [torch.where(side > -torch.inf, side.exp() * (side - middle), 0.0).sum(-1) for side in (one, other)]
    return ((halves[0] + halves[1]) / (2 * math.log(2))).clamp(0.0, 1.0)
