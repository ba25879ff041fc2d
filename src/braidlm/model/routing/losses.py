"""Routing losses: pure functions of a routing and of a mask of real tokens, so that padding is never included.

Where a paper's formula or code does the opposite of its text, the plain name does what the text says, and the formula
and the code are registered as `..._as_printed` and `..._as_coded`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config.registry import Registry
from ..errors import BraidError, did_you_mean
from .routing import COMBINED, Routing, Routings

routing_losses = Registry("routing loss", third_party=True)

Measure = Callable[[Routing, Tensor], Tensor]  # a function of a routing and of a mask of real tokens [batch, time]
Evaluator = Callable[[Measure, list[Routing], Tensor], Tensor]
"""A function that computes a measure for each routing of a group of one shape."""


@routing_losses.register("token_entropy")
def token_entropy(routing: Routing, real_BT: Tensor) -> Tensor:
    """Keeps each token's probabilities soft: 0 when they are equal, log N when one of them is 1."""
    return math.log(len(routing.choices)) - masked_mean(_entropy(routing.probabilities_BTN), real_BT)


@routing_losses.register("token_entropy_as_printed")
def token_entropy_as_printed(routing: Routing, real_BT: Tensor) -> Tensor:
    """PaPaformer's Eq. 8: makes each token's probabilities sharp, the opposite of what the paper's text says. It sums
    over the paths, without their combination."""
    return masked_mean(_entropy(_paths_alone(routing)), real_BT)


@routing_losses.register("token_entropy_as_coded")
def token_entropy_as_coded(routing: Routing, real_BT: Tensor) -> Tensor:
    """PaPaformer's code: minus the entropy of the sampled weights, which is 0 whenever the sample is hard."""
    return -masked_mean(_entropy(routing.weights_BTN), real_BT)


@routing_losses.register("load_balance")
def load_balance(routing: Routing, real_BT: Tensor) -> Tensor:
    """Spreads tokens evenly: 0 when all choices are used equally, log N when one has all tokens."""
    return math.log(len(routing.choices)) - _entropy(masked_mean(routing.probabilities_BTN, real_BT))


@routing_losses.register("load_balance_as_printed")
def load_balance_as_printed(routing: Routing, real_BT: Tensor) -> Tensor:
    """PaPaformer's Eq. 9: lowest when one choice has all tokens, so that it rewards collapse. It sums over the paths,
    without their combination."""
    return _entropy(masked_mean(_paths_alone(routing), real_BT))


@routing_losses.register("load_balance_as_coded")
def load_balance_as_coded(routing: Routing, real_BT: Tensor) -> Tensor:
    """PaPaformer's code: Eq. 9 on the sampled weights; it rewards collapse too."""
    return _entropy(masked_mean(routing.weights_BTN, real_BT))


@routing_losses.register("switch")
def switch(routing: Routing, real_BT: Tensor) -> Tensor:
    """Switch Transformer's: N x the sum of mean probability x share of tokens; 1 when even, N when one has all."""
    selected = (routing.weights_BTN.detach() > 0).float()
    share = masked_mean(selected / selected.sum(-1, keepdim=True).clamp_min(1.0), real_BT)
    return len(routing.choices) * (masked_mean(routing.probabilities_BTN, real_BT) * share).sum()


@routing_losses.register("mutual_information")
def mutual_information(routing: Routing, real_BT: Tensor) -> Tensor:
    """ModuleFormer's, for pretraining: minus the mutual information of tokens and choices. 0 when a choice says nothing
    about its token, -log N when every token is certain and all choices are used equally."""
    together = masked_mean(routing.probabilities_BTN, real_BT)
    return masked_mean(_entropy(routing.probabilities_BTN), real_BT) - _entropy(together)


@routing_losses.register("load_concentration")
def load_concentration(routing: Routing, real_BT: Tensor) -> Tensor:
    """ModuleFormer's, for fine-tuning before pruning: 0 when one choice has all tokens, log N when the use is even."""
    return _entropy(masked_mean(routing.probabilities_BTN, real_BT))


@routing_losses.register("z_loss")
def z_loss(routing: Routing, real_BT: Tensor) -> Tensor:
    """Keeps the router's scores small: the mean square of their log-sum-exp."""
    if routing.scores_BTN is None:
        raise BraidError(f"{routing.name}: z_loss needs the router's scores, which this router does not return")
    return masked_mean(routing.scores_BTN.float().logsumexp(-1).square(), real_BT)


@routing_losses.register("new_rows")
def new_rows(routing: Routing, real_BT: Tensor) -> Tensor:
    """ModuleFormer's routing regularisation, against forgetting: the squared norm of a router's rows for inserted
    choices, which limits how often they are chosen; 0 where there are none."""
    rows = routing.new_rows
    return torch.zeros((), device=real_BT.device) if rows is None else rows.float().square().sum()


def routing_loss(routings: Routings, real_BT: Tensor, evaluate: Evaluator | None = None) -> Tensor:
    """The sum of all routers' losses, each with its weight."""
    total = torch.zeros((), device=real_BT.device)
    for group in _group_by_shape(routings):
        for name, weight in group[0].losses.items():
            total = total + weight * (evaluate or evaluate_each)(routing_losses[name], group, real_BT).sum()
    return total


def usages(routings: Routings, real_BT: Tensor, evaluate: Evaluator | None = None) -> dict[str, Tensor]:
    """Each choice's share [N] of the real tokens' weights, by router."""
    return _by_name(usage, routings, real_BT, evaluate or evaluate_each)


def loads(routings: Routings, real_BT: Tensor, evaluate: Evaluator | None = None) -> dict[str, Tensor]:
    """Each choice's share [N] of the real tokens' selections, unweighted, by router."""
    return _by_name(load, routings, real_BT, evaluate or evaluate_each)


def _by_name(measure: Measure, routings: Routings, real_BT: Tensor, evaluate: Evaluator) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for group in _group_by_shape(routings):
        values |= zip((r.name for r in group), evaluate(measure, group, real_BT).detach().unbind(), strict=True)
    return {routing.name: values[routing.name] for routing in routings}


def _group_by_shape(routings: Routings) -> list[list[Routing]]:
    """Groups of routings that can be computed together: of one shape, with the same losses."""
    groups: dict[object, list[Routing]] = {}
    for routing in routings:
        rows = None if routing.new_rows is None else routing.new_rows.shape
        missing = (routing.scores_BTN is None, routing.present_BT is None)
        shapes = (routing.probabilities_BTN.shape, routing.chosen_BTK.shape, missing, rows)
        groups.setdefault((shapes, len(routing.choices), tuple(sorted(routing.losses.items()))), []).append(routing)
    return list(groups.values())


def evaluate_each(measure: Measure, group: list[Routing], real_BT: Tensor) -> Tensor:
    """A measure of each routing of a group; on a GPU all at once, since small operations are slow there."""
    if not real_BT.is_cuda or torch.compiler.is_compiling():
        return torch.stack([measure(routing, routing.present_of(real_BT)) for routing in group])
    return evaluate_together(measure, group, real_BT)


def evaluate_together(measure: Measure, group: list[Routing], real_BT: Tensor) -> Tensor:
    """A measure of each routing of a group, by one vectorised call."""
    names = ["probabilities_BTN", "chosen_BTK", "weights_BTK"]
    names += [name for name in ("scores_BTN", "new_rows", "present_BT") if getattr(group[0], name) is not None]

    def evaluate_one(*tensors: Tensor) -> Tensor:
        changed: dict[str, Any] = dict(zip(names, tensors, strict=True))
        routing = replace(group[0], **changed)
        return measure(routing, routing.present_of(real_BT))

    return torch.vmap(evaluate_one)(*(torch.stack([getattr(routing, name) for routing in group]) for name in names))


def check_losses(names: Iterable[str]) -> None:
    """Refuse a name that is not a routing loss."""
    for name in names:
        if name not in routing_losses:
            raise BraidError(f"losses: unknown routing loss '{name}'.{did_you_mean(name, routing_losses)}")


def usage(routing: Routing, real_BT: Tensor) -> Tensor:
    """Each choice's share [N] of the real tokens' weights."""
    share = masked_mean(routing.weights_BTN, real_BT)
    return share / share.sum().clamp_min(1e-9)


def load(routing: Routing, real_BT: Tensor) -> Tensor:
    """Each choice's share [N] of the real tokens' selections, unweighted."""
    selected = torch.zeros_like(routing.probabilities_BTN).scatter(-1, routing.chosen_BTK, 1.0)
    share = masked_mean(selected, real_BT)
    return share / share.sum().clamp_min(1e-9)


def _paths_alone(routing: Routing) -> Tensor:
    """The probabilities of a join's k paths, where the router has k + 1 choices; of other routers, all."""
    return routing.probabilities_BTN[..., : len(routing.choices) - (COMBINED in routing.choices)]


def _entropy(probabilities: Tensor) -> Tensor:
    """The entropy in nats over the last dimension; 0 log 0 is 0, with a finite gradient."""
    return -(probabilities.float() * probabilities.float().clamp_min(1e-9).log()).sum(-1)


def masked_mean(values_BT: Tensor, real_BT: Tensor) -> Tensor:
    """The mean over real tokens; further dimensions stay."""
    real = real_BT.to(torch.float32)
    weighted = values_BT.float() * real[(...,) + (None,) * (values_BT.ndim - 2)]
    return weighted.sum((0, 1)) / real.sum().clamp_min(1.0)
