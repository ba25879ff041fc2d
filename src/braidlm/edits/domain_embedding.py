"""Rows of routers that begin as the embedding of a domain, the mean of what a router reads in its text (FlexOlmo)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from braidlm.edits.modules import Modules, calibration_texts, sums_over_tokens
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.opening.braid import OpenedBraid


class DomainRow(NamedTuple):
    """A router's row for the modules of a domain, and what is added to its score."""

    weight: Tensor
    bias: Tensor


class _Seen(NamedTuple):
    """Means over a text."""

    read: Tensor
    """Of what a router multiplies its rows with."""
    best: Tensor
    """Of the highest score."""
    worst: Tensor


def domain_rows(
    source: OpenedBraid, modules: Sequence[Modules], text: str, beside: str | None, tokens: int
) -> dict[str, DomainRow]:
    """By a routed part's address, the row for a domain.

    Its direction is the mean of what the router reads in the domain's text, less that in the text `beside`. From there
    to here its score rises as far as those of the model's own modules lie apart, and where the router has a bias it is
    on the domain's text, in the mean, that of the best of these.
    """
    model = source.load(dtype=torch.float32)
    own = _seen(model, modules, calibration_texts(source, text, tokens))
    other = {} if beside is None else _seen(model, modules, calibration_texts(source, beside, tokens))
    rows = {}
    for address, here in own.items():
        direction = here.read - (other[address].read if other else 0.0)
        weight = direction * (here.best - here.worst) / direction.square().sum().clamp_min(1e-12)
        rows[address] = DomainRow(weight.float(), (here.best - weight @ here.read).float())
    return rows


def _seen(model: BraidForCausalLM, modules: Sequence[Modules], texts: Sequence[Sequence[int]]) -> dict[str, _Seen]:
    def measure(router: Any, inputs: tuple[Any, ...], output: Any) -> Tensor:
        scores = output.scores_BTN
        ends = (scores.amax(-1, keepdim=True), scores.amin(-1, keepdim=True), torch.ones_like(scores[..., :1]))
        return torch.cat((router.read(inputs[0]), *ends), dim=-1)

    routers = {f"{one.address}.router": one.address for one in modules}
    sums = sums_over_tokens(model, dict.fromkeys(routers, measure), texts, "what routers read")
    means = {routers[name]: total[:-1] / total[-1] for name, total in sums.items()}
    return {address: _Seen(mean[:-2], mean[-2], mean[-1]) for address, mean in means.items()}
