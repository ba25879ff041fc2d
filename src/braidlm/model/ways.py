"""Two ways to compute what routers chose: sparse (the chosen only) and dense (everything, then hidden).

Both give the same. Which is faster is measured, once for each shape and device; `compute` in a router's options forces
one of them.
"""

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

Compute = Literal["measured", "sparse", "dense"]
TRIALS = 3
WORTH = 0.9
"""Dense is taken only where it needs less than this share of the time: near a tie the choice should not waver."""

_found: dict[tuple[object, ...], str] = {}
"""What was measured. Results do not depend on it beyond rounding."""


def faster_way(
    compute: Compute,
    bank: nn.Module,
    facts: tuple[object, ...],
    x: Tensor,
    sparse: Callable[[], Tensor],
    dense: Callable[[], Tensor],
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
        times = {way: _time(compute_it, x, bank) for way, compute_it in (("sparse", sparse), ("dense", dense))}
        _found[key] = "dense" if times["dense"] < WORTH * times["sparse"] else "sparse"
    return _found[key]


def _time(compute: Callable[[], Tensor], x: Tensor, bank: nn.Module) -> float:
    """Of the forward pass, and of the backward pass where one will come; leaves random numbers as they were."""
    best = float("inf")
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        for _ in range(TRIALS):
            _wait(x)
            begin = time.perf_counter()
            made = compute()
            if made.requires_grad:
                leaves = [p for p in (x, *bank.parameters()) if p.requires_grad]
                torch.autograd.grad(made, leaves, torch.ones_like(made), retain_graph=True, allow_unused=True)
            _wait(x)
            best = min(best, time.perf_counter() - begin)
    return best


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
