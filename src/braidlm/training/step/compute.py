"""How a model is computed here: in bf16 where the hardware is fast at it, routed parts sparse or dense, CPU threads.

Which of two equal computations of a routed part is faster, how many CPU threads are, and on a CPU with instructions for
bf16 which type is, is measured before the first step, once, by a process that trains alone. Checkpoints keep it, so
that every resumed run rounds alike: sums are divided among threads.

Threads of one operation wait for each other. Where another program holds a core, all wait until it is given back: on
two busy cores two threads were fifteen times slower than one (LOG.md).
"""

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from braidlm.core import console
from braidlm.model.routing.dispatch import supports_grouped_mm
from braidlm.model.routing.stacked import StackedLinear
from braidlm.training.step.parallel import Rank
from braidlm.training.step.spread import is_spread
from braidlm.training.trainable import Trainable

TRIALS, THREAD_TRIALS = 3, 2
ADVANTAGE = 0.9
"""Dense, bf16 or more threads are chosen only where they need less than this share of the time: near a tie the choice
should not vary, and the machine may get busier."""
STARVED = 0.6
"""Threads that get less than this share of a core each wait for cores: undisturbed they get 0.8 or more (LOG.md)."""
PATIENCE = 10.0  # seconds of training before a run says that its threads wait

Choices = dict[str, str]  # `sparse` or `dense` for each routed part, by its name in the model


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The type of matrix products; a device that is slow at bf16 gets float32 and a message."""
    if precision == "pure_bf16":
        return torch.bfloat16
    on_gpu = device.type == "cuda"
    if precision == "float32" or (precision == "auto" and not on_gpu):
        return torch.float32
    if torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else cpu_is_fast_at_bf16():
        return torch.bfloat16
    if precision == "bf16":
        why = "This GPU has no bf16" if on_gpu else "This CPU is slow at bf16 (about 100 times)"
        console.say(f"{why}: computing in float32.")
    return torch.float32


def cpu_is_fast_at_bf16() -> bool:
    """Whether the CPU has instructions for products of bf16; without, oneDNN computes them all the same, but slowly."""
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("arm64", "aarch64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    checks = (getattr(torch.cpu, name, bool) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(check() for check in checks)


def choose_cpu_dtype(
    trained: Trainable, shape: tuple[int, int], rank: Rank, precision: str, saved: str | None
) -> torch.dtype | None:
    """What `precision: auto` is on a CPU with instructions for bf16: the checkpoint's type, else bf16 where a pass is
    clearly faster in it. None where there is nothing to choose."""
    if precision != "auto" or rank.device.type != "cpu" or rank.world_size > 1 or not cpu_is_fast_at_bf16():
        return None
    if saved is not None:
        return torch.bfloat16 if saved == "bf16" else torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        with autocast(rank.device, dtype):
            _seconds_of_a_pass(trained, shape)  # the first pass prepares
            seconds[dtype] = min(_seconds_of_a_pass(trained, shape) for _ in range(THREAD_TRIALS))
    faster = seconds[torch.float32] / seconds[torch.bfloat16]
    chosen = torch.bfloat16 if faster * ADVANTAGE > 1 else torch.float32
    name, other = ("bf16", "float32") if chosen is torch.bfloat16 else ("float32", "bf16")
    console.say(
        f"Computing in {name}: bf16 is {faster:.2g} times as fast here; training.precision={other} sets the other."
    )
    return chosen


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Autocast to `dtype`, or nothing for float32. Weights are cast again in each pass, as graph capture requires."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)


def choose_compute(
    model: "transformers.PreTrainedModel",
    lowered: set[nn.Module],
    shape: tuple[int, int],
    rank: Rank,
    dtype: torch.dtype,
) -> Choices:
    """Measure the parts whose `compute` is `measured` and that no kernel serves, on batches of `shape`. Where weights
    lie on several processes no part is whole by itself: they follow the rule without a measurement."""
    if is_spread(model):
        return {}
    measured = {name: part for name, part in model.named_modules() if getattr(part, "compute", None) == "measured"}
    parts = {name: part for name, part in measured.items() if part not in lowered}
    choices: Choices = {}
    if parts:
        devices = [rank.device] if rank.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), autocast(rank.device, dtype):
            inputs = _inputs_of(model, parts, torch.randint(model.config.vocab_size, shape, device=rank.device))
            by_shape: dict[Any, str] = {}
            for name, part in parts.items():
                key = (type(part), tuple(parameter.shape for parameter in part.parameters()))
                if key not in by_shape:
                    by_shape[key] = _faster(part, *inputs[name])
                choices[name] = by_shape[key]
    return choices


def use_compute(model: "transformers.PreTrainedModel", choices: Choices) -> None:
    """Let routed parts compute as chosen, and say so."""
    for name, choice in choices.items():
        model.get_submodule(name).compute = choice  # type: ignore[assignment]
    if choices:
        made = list(choices.values())
        each = ", ".join(f"{made.count(choice)} computed {choice}" for choice in sorted(set(made)))
        console.say(f"Routed parts: {each}, the faster here.")


def _inputs_of(
    model: "transformers.PreTrainedModel", parts: dict[str, nn.Module], ids: Tensor
) -> dict[str, tuple[Any, ...]]:
    """What each part reads in a forward pass."""
    inputs: dict[str, tuple[Any, ...]] = {}

    def record(name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs[name] = arguments

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, part in parts.items():
            hooks.callback(part.register_forward_pre_hook(partial(record, name)).remove)
        model.base_model(ids, use_cache=False)
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


def choose_threads(
    trained: Trainable, shape: tuple[int, int], rank: Rank, asked: int | None, saved: int | None
) -> int | None:
    """The number of the recipe, else of the checkpoint, else of the environment, else the fastest; None on a GPU."""
    if rank.device.type != "cpu":
        return None
    most = torch.get_num_threads()
    if given := asked or saved:
        if given != most:
            console.say(f"Computing with {_counted(given)}, as {'the recipe says' if asked else 'before'}.")
        return given
    if most == 1 or os.environ.get("OMP_NUM_THREADS"):  # somebody chose: the user, or torchrun for several processes
        return most
    if is_spread(trained.model):
        return max(1, most // int(os.environ.get("LOCAL_WORLD_SIZE", rank.world_size)))
    threads = fastest(lambda: _seconds_of_a_pass(trained, shape), most)
    console.say(f"Computing with {_counted(threads)} of {most}, the fastest here now; training.threads=N sets another.")
    return threads


def saved_threads(position: dict[str, Any]) -> int | None:
    """The number that a checkpoint was computed with; None if that was on a GPU."""
    threads = position.get("threads", torch.get_num_threads())  # earlier versions took torch's own number
    if threads is not None and not (isinstance(threads, int) and threads >= 1):
        raise ValueError(f"{threads} is no number of threads")
    return threads


def fastest(seconds: Callable[[], float], most: int) -> int:
    """The best number of threads among `most` and its halves; one that is clearly slower than more ends the search."""
    best, best_seconds, threads = most, float("inf"), most
    while threads >= 1:
        with using_threads(threads):
            seconds()  # the first pass starts the threads
            taken = min(seconds() for _ in range(THREAD_TRIALS))
        if taken * ADVANTAGE > best_seconds:
            break
        best, best_seconds, threads = threads, min(taken, best_seconds), threads // 2
    return best


@contextlib.contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Compute with this number of threads; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds_of_a_pass(trained: Trainable, shape: tuple[int, int]) -> float:
    """A forward and a backward pass over random tokens; neither the gradients nor the random state are touched."""
    with torch.random.fork_rng(devices=[]):
        ids, objective = torch.randint(trained.model.config.vocab_size, shape), trained.objective()
        begin = time.perf_counter()
        losses = objective(ids, ids, torch.tensor(float(ids.numel())))
        whole = losses.text if losses.routing is None else losses.text + losses.routing
        torch.autograd.grad(whole, [p for p in trained.model.parameters() if p.requires_grad], allow_unused=True)
        return time.perf_counter() - begin


class StarvedThreads:
    """Notices that the threads of a run wait for cores that another program took after their number was chosen.

    The run goes on with them, because another number rounds differently; its user may choose.
    """

    def __init__(self) -> None:
        self.low: list[float] = []  # seconds of each reading since the threads wait
        self.said = False

    def update(self, threads: int, cores: float, seconds: float) -> str | None:
        """A warning, once, after `seconds` in which the threads had the time of so many `cores`."""
        if threads == 1 or self.said:
            return None
        self.low = [*self.low, seconds] if cores < STARVED * threads else []
        # One reading alone may be of something else than steps, such as compiling.
        self.said = len(self.low) > 1 and sum(self.low) >= PATIENCE
        if not self.said:
            return None
        return (
            f"{_counted(threads)} get the time of {cores:.1f} cores here, probably because another program runs too. "
            "They wait for each other, so that fewer may be faster: stop with Ctrl-C, and the same command with "
            f"training.threads={max(1, int(cores))} goes on from there"
        )


def _counted(threads: int) -> str:
    return f"{threads} CPU thread{'' if threads == 1 else 's'}"
