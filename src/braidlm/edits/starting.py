"""How the fresh projections and joins of a composed model begin.

`mean` lets them pass on what the paths make: each path's own part where the stream has one for each, the mean of all
where the stream is as narrow as a path. What the paths know is then there from the first step; docs/compose.md has the
numbers. `random` is PaPaformer's way: as the model's initialisation says, like everything else that is fresh.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from braidlm.model.paths.gumbel import GumbelJoin
from braidlm.model.paths.joins import LevelJoin, SharedLinear
from braidlm.model.paths.parallel import ParallelLayer
from braidlm.model.paths.project import ProjectStage

STARTS = {
    "mean": "by passing on what the paths make, the mean of all or each path's own part (`--start random`: by chance)",
    "random": "by chance, as the initialisation says (`--start mean`: with what the paths know)",
}
"""By name, in words."""


@torch.no_grad()
def begin_as_mean(model: nn.Module) -> None:
    """Set projections and joins to pass on what comes; routers, and joins of other packages, stay as they are."""
    layers = [module for module in model.modules() if isinstance(module, ParallelLayer)]
    widths = layers[0].widths
    for module in model.modules():
        if isinstance(module, (ProjectStage, SharedLinear)) and module.linear is not None:
            _pass_on(module.linear, widths)
        elif isinstance(module, GumbelJoin):
            _pass_on(module.combine, widths)
        if isinstance(module, LevelJoin) and module.out is not None:
            _pass_on(module.out, widths)
    for layer in layers:
        own = dict(zip(layer.names, torch.eye(sum(widths)).split(widths), strict=True))
        for name, linear in layer.enter.items() if isinstance(layer.enter, nn.ModuleDict) else ():
            _set(linear, own[name])
        join = layer.join
        for name, linear in join.leave.items() if isinstance(join, LevelJoin) else ():
            _set(linear, own[name].t())


def _pass_on(linear: nn.Linear, widths: Sequence[int]) -> None:
    _set(linear, _passing(linear.out_features, linear.in_features, widths))


def _set(linear: nn.Module, matrix: Tensor) -> None:
    assert isinstance(linear, nn.Linear)
    linear.weight.copy_(matrix)


def _passing(rows: int, columns: int, widths: Sequence[int]) -> Tensor:
    """The matrix that changes nothing; to a narrow stream the mean of all parts, from one the same for all parts."""
    if rows == columns:
        return torch.eye(rows)
    narrow, parts = torch.eye(widths[0]), len(widths)
    return torch.cat([narrow / parts] * parts, dim=1) if rows < columns else torch.cat([narrow] * parts)
