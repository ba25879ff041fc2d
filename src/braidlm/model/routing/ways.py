"""Two ways to compute what routers chose: sparse (the chosen only) and dense (everything, then hidden).

Both give the same. Which is faster is measured, once for each shape and device; `compute` in a router's options forces
one of them.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .routing import Routing

Compute = Literal["measured", "sparse", "dense"]
TRIALS = 3
WORTH = 0.9
"""Dense is taken only where it needs less than this share of the time: near a tie the choice should not waver."""

Way = Callable[[Tensor, Routing], Tensor]
"""What a bank makes of a stream under a routing."""

_found: dict[tuple[object, ...], str] = {}
"""What was measured. Results do not depend on it beyond rounding."""


def faster_way(
    compute: Compute,
    bank: nn.Module,
    facts: tuple[object, ...],
    x: Tensor,
    routing: Routing,
    sparse: Way,
    dense: Way,
) -> str:
    """The way to compute what `bank` makes of `x` [..., width]; `facts` and the bank's shapes tell what is alike.

    Both ways may be tried out here.
    """
    if compute != "measured":
        return compute
    if torch.compiler.is_compiling():  # a trace cannot wait for the host, nor measure
        return "dense"
    tokens = 1 << (x.numel() // x.shape[-1] - 1).bit_length()
    shapes = tuple(p.shape for p in bank.parameters())
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type))
    key = (type(bank), *facts, shapes, tokens, x.dtype, x.device, *modes)
    if key not in _found:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return "dense"
        times = {name: _time(way, x, routing, bank) for name, way in (("sparse", sparse), ("dense", dense))}
        _found[key] = "dense" if times["dense"] < WORTH * times["sparse"] else "sparse"
    return _found[key]


def _time(way: Way, x: Tensor, routing: Routing, bank: nn.Module) -> float:
    """Of the forward pass, and of the backward pass where one will come; leaves random numbers as they were."""
    x, weights = _apart(x), _apart(routing.weights_BTK)
    routing = replace(routing, probabilities_BTN=routing.probabilities_BTN.detach(), weights_BTK=weights)
    best = float("inf")
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), _unrecorded():
        for _ in range(TRIALS):
            _wait(x)
            begin = time.perf_counter()
            made = way(x, routing)
            if made.requires_grad:
                leaves = [p for p in (x, weights, *bank.parameters()) if p.requires_grad]
                torch.autograd.grad(made, leaves, torch.ones_like(made), allow_unused=True)
            _wait(x)
            best = min(best, time.perf_counter() - begin)
    return best


def _apart(x: Tensor) -> Tensor:
    """The same numbers with no history: the pass that is under way must not notice a trial."""
    return x.detach().requires_grad_(x.requires_grad)


def _unrecorded() -> Any:
    """Activation checkpointing counts what is kept for the backward pass; of a trial it must see nothing."""
    return torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
