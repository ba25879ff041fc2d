"""How a model is computed here: in bf16 where the hardware is fast at it, and routed parts sparse or dense.

Which of two equal computations of a routed part is faster is measured before the first step, once, by the main process,
and kept in the run's checkpoints, so that every process and every resumed run rounds alike.
"""

import contextlib
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from braidlm.core import console
from braidlm.model.routing.dispatch import supports_grouped_mm
from braidlm.model.routing.stacked import StackedLinear
from braidlm.training.step.parallel import Rank, broadcast

TRIALS = 3
ADVANTAGE = 0.9
"""Dense is chosen only where it needs less than this share of the time: near a tie the choice should not vary."""

Choices = dict[str, str]
"""`sparse` or `dense` for each routed part, by its name in the model."""


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The type of matrix products; a CPU that is slow at bf16 gets float32 and a message."""
    if precision == "float32":
        return torch.float32
    if precision == "pure_bf16":
        return torch.bfloat16
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        if precision == "bf16":
            console.say("This GPU has no bf16: computing in float32.")
        return torch.float32
    if precision == "bf16":
        if cpu_is_fast_at_bf16():
            return torch.bfloat16
        console.say("This CPU is slow at bf16 (about 100 times): computing in float32.")
    return torch.float32


def cpu_is_fast_at_bf16() -> bool:
    """Whether the CPU has matrix instructions for bf16."""
    check = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(check is not None and torch.backends.mkldnn.is_available() and check())


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Autocast to `dtype`, or nothing for float32. Weights are cast again in each pass, as graph capture requires."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)


def choose_compute(
    model: PreTrainedModel, lowered: set[nn.Module], shape: tuple[int, int], rank: Rank, dtype: torch.dtype
) -> Choices:
    """Measure the parts whose `compute` is `measured` and that no kernel serves, on batches of `shape`."""
    measured = {name: part for name, part in model.named_modules() if getattr(part, "compute", None) == "measured"}
    parts = {name: part for name, part in measured.items() if part not in lowered}
    choices: Choices = {}
    if parts and rank.is_main:
        devices = [rank.device] if rank.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), autocast(rank.device, dtype):
            inputs = _inputs_of(model, parts, torch.randint(model.config.vocab_size, shape, device=rank.device))
            by_shape: dict[Any, str] = {}
            for name, part in parts.items():
                key = (type(part), tuple(parameter.shape for parameter in part.parameters()))
                if key not in by_shape:
                    by_shape[key] = _faster(part, *inputs[name])
                choices[name] = by_shape[key]
    return broadcast(choices, rank) if parts else {}


def use_compute(model: PreTrainedModel, choices: Choices) -> None:
    """Let routed parts compute as chosen, and say so."""
    for name, choice in choices.items():
        model.get_submodule(name).compute = choice  # type: ignore[assignment]
    counts = {choice: list(choices.values()).count(choice) for choice in sorted(set(choices.values()))}
    if counts:
        each = ", ".join(f"{n} computed {choice}" for choice, n in counts.items())
        console.say(f"Routed parts: {each}, the faster here.")


def _inputs_of(model: PreTrainedModel, parts: dict[str, nn.Module], ids: Tensor) -> dict[str, tuple[Any, ...]]:
    """What each part reads in a forward pass."""
    inputs: dict[str, tuple[Any, ...]] = {}

    def record(name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs[name] = arguments

    hooks = [part.register_forward_pre_hook(partial(record, name)) for name, part in parts.items()]
    try:
        with torch.no_grad():
            model.base_model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _faster(part: Any, hidden: Tensor, *rest: Any) -> str:
    stacks = [module for module in part.modules() if isinstance(module, StackedLinear)]
    if hidden.is_cuda and not all(supports_grouped_mm(stack.weight, torch.bfloat16) for stack in stacks):
        return "dense"  # the sparse computation would read counts from the device, which a graph cannot
    seconds = {}
    for choice in ("sparse", "dense"):
        part.compute = choice
        seconds[choice] = min(_time(part, hidden, rest) for _ in range(TRIALS))
    part.compute = "measured"
    return "dense" if seconds["dense"] < ADVANTAGE * seconds["sparse"] else "sparse"


def _time(part: nn.Module, hidden: Tensor, rest: tuple[Any, ...]) -> float:
    """Seconds of a forward and a backward pass."""
    hidden = hidden.detach().requires_grad_()
    begin = _now(hidden)
    output, _ = part(hidden, *rest)
    leaves = [hidden, *(parameter for parameter in part.parameters() if parameter.requires_grad)]
    torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
    return _now(hidden) - begin


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
