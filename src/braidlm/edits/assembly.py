"""The edited model in memory: fresh weights are initialised by a seed, all others read one after another."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from braidlm.core.models.folders import fill
from braidlm.core.models.memory import check_weights_fit, weights_bytes
from braidlm.edits.account import Account, Part
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.paths.gumbel import GumbelJoin
from braidlm.model.paths.joins import SameWidthJoin, SharedLinear
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.paths.project import ProjectStage
from braidlm.opening.braid import OpenedBraid

STARTS = {
    "mean": "by passing on the paths' outputs, the mean of all or each path's own part (`--start random`: at random)",
    "random": "at random, as the initialisation says (`--start mean`: by passing on the paths' outputs)",
}
"""Initialisations of joins and projections, in words.

`mean` lets them pass on the outputs of the paths: each path's own part where the stream has one for each, the mean of
all where the stream is as narrow as a path. What the paths have learned is then used from the first step;
docs/compose.md has the numbers. `random` is PaPaformer's: as the model's initialisation says, like all fresh parts.
"""


def assemble(
    model: BraidForCausalLM, account: Account, sources: Mapping[str, OpenedBraid], seed: int
) -> BraidForCausalLM:
    """Fill a skeleton as the account says; of the sources only one tensor's parts are in memory at a time."""
    check_weights_fit(weights_bytes(model))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for address, module in model.named_modules():
            own = [f"{address}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if own and all(name in account.fresh for name in own):
                module.to_empty(device="cpu", recurse=False)
                model._init_weights(module)

    def read(part: Part) -> Tensor:
        return sources[part.source].read(part.tensor)

    state = {name: origin.compute(read) for name, origin in account.derived.items()}
    # A fresh buffer begins at zero: the ranking of a router that balances, the opening of its new choices.
    state |= {name: torch.zeros_like(b, device="cpu") for name, b in model.named_buffers() if name in account.fresh}
    state |= {name: p.data for name, p in model.named_parameters() if name in account.fresh}
    fill(model, state)
    assert not any(tensor.is_meta for tensor in model.state_dict().values()), "every tensor has its values"
    return model


@torch.no_grad()
def initialise_as_mean(model: nn.Module) -> None:
    """Set projections and joins to pass on their inputs; routers, and joins of other packages, stay as they are."""
    layers = [module for module in model.modules() if isinstance(module, ParallelLayer)]
    widths = layers[0].widths
    for module in model.modules():
        if isinstance(module, (ProjectStage, SharedLinear)) and module.linear is not None:
            _pass_on(module.linear, widths)
        elif isinstance(module, GumbelJoin):
            _pass_on(module.combine, widths)
        if isinstance(module, SameWidthJoin) and module.out is not None:
            _pass_on(module.out, widths)
    for layer in layers:
        own = dict(zip(layer.names, torch.eye(sum(widths)).split(widths), strict=True))
        for name, linear in layer.enter.items() if isinstance(layer.enter, nn.ModuleDict) else ():
            _set(linear, own[name])
        join = layer.join
        for name, linear in join.leave.items() if isinstance(join, SameWidthJoin) else ():
            _set(linear, own[name].t())


def _pass_on(linear: nn.Linear, widths: Sequence[int]) -> None:
    _set(linear, _passing(linear.out_features, linear.in_features, widths))


def _set(linear: nn.Module, matrix: Tensor) -> None:
    assert isinstance(linear, nn.Linear)
    linear.weight.copy_(matrix)


def _passing(rows: int, columns: int, widths: Sequence[int]) -> Tensor:
    """The identity; to a narrower stream the mean of all parts, from a narrower one the same copy for all parts."""
    if rows == columns:
        return torch.eye(rows)
    narrow, parts = torch.eye(widths[0]), len(widths)
    return torch.cat([narrow / parts] * parts, dim=1) if rows < columns else torch.cat([narrow] * parts)
