"""Sparse or dense: which of two equal computations of routed parts is faster here, measured before the first step.

The choice is made once by the main process and kept in the run's checkpoints, so that every process and every resumed
run rounds alike.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from braidlm.core import console
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.model.routing.dispatch import supports_grouped_mm
from braidlm.model.routing.stacked import StackedLinear
from braidlm.training.parallel import Rank, broadcast
from braidlm.training.precision import autocast

TRIALS = 3
ADVANTAGE = 0.9
"""Dense is chosen only where it needs less than this share of the time: near a tie the choice should not vary."""

Choices = dict[str, str]
"""`sparse` or `dense` for each routed part, by its name in the model."""


def choose_compute(
    model: BraidForCausalLM, lowered: set[nn.Module], shape: tuple[int, int], rank: Rank, dtype: torch.dtype
) -> Choices:
    """Measure the parts whose `compute` is `measured` and that no kernel serves, on batches of `shape`."""
    parts = {name: part for name, part in model.named_modules() if _is_measured(part) and part not in lowered}
    if not parts:
        return {}
    choices = _measure(model, parts, shape, rank.device, dtype) if rank.is_main else {}
    return broadcast(choices, rank)


def use_compute(model: BraidForCausalLM, choices: Choices) -> None:
    """Let routed parts compute as chosen."""
    for name, choice in choices.items():
        model.get_submodule(name).compute = choice  # type: ignore[assignment]


def report_compute(choices: Choices) -> None:
    """Say what was chosen, if there was a choice."""
    counts = {choice: list(choices.values()).count(choice) for choice in sorted(set(choices.values()))}
    if counts:
        console.say("Routed parts are computed " + ", ".join(f"{choice} ({n})" for choice, n in counts.items()) + ".")


def _is_measured(part: nn.Module) -> bool:
    return getattr(part, "compute", None) == "measured"


def _measure(
    model: BraidForCausalLM,
    parts: dict[str, nn.Module],
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> Choices:
    choices: Choices = {}
    by_shape: dict[Any, str] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), autocast(device, dtype):
        inputs = _inputs_of(model, parts, shape, device)
        for name, part in parts.items():
            key = (type(part), tuple(parameter.shape for parameter in part.parameters()))
            if key not in by_shape:
                by_shape[key] = _faster(part, inputs[name])
            choices[name] = by_shape[key]
    return choices


def _inputs_of(
    model: BraidForCausalLM, parts: dict[str, nn.Module], shape: tuple[int, int], device: torch.device
) -> dict[str, tuple[Any, ...]]:
    """What each part reads in a forward pass over random tokens."""
    inputs: dict[str, tuple[Any, ...]] = {}

    def recorder(name: str) -> Any:
        def record(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            inputs[name] = arguments

        return record

    hooks = [part.register_forward_pre_hook(recorder(name)) for name, part in parts.items()]
    try:
        with torch.no_grad():
            model.model(torch.randint(model.config.vocab_size, shape, device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _faster(part: Any, inputs: tuple[Any, ...]) -> str:
    hidden, *rest = inputs
    stacks = (module for module in part.modules() if isinstance(module, StackedLinear))
    if hidden.is_cuda and not all(_can_be_grouped(stack, hidden) for stack in stacks):
        return "dense"  # the sparse computation would read counts from the device, which a graph cannot
    seconds = {}
    for choice in ("sparse", "dense"):
        part.compute = choice
        seconds[choice] = min(_time(part, hidden, rest) for _ in range(TRIALS))
    part.compute = "measured"
    return "dense" if seconds["dense"] < ADVANTAGE * seconds["sparse"] else "sparse"


def _can_be_grouped(stack: StackedLinear, hidden: Tensor) -> bool:
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return supports_grouped_mm(stack.weight, dtype)


def _time(part: nn.Module, hidden: Tensor, rest: list[Any]) -> float:
    """Seconds of a forward and a backward pass."""
    hidden = hidden.detach().requires_grad_()
    _wait(hidden)
    begin = time.perf_counter()
    output, _ = part(hidden, *rest)
    leaves = [hidden, *(parameter for parameter in part.parameters() if parameter.requires_grad)]
    torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
    _wait(hidden)
    return time.perf_counter() - begin


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
