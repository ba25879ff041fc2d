"""Whole optimizer steps with a mixture of depths on every second layer against the full model, in one run.

python benchmarks/mixture_of_depths.py                     # CPU
python benchmarks/mixture_of_depths.py --size 28m          # with a vocabulary of 16,384, whose head all tokens pay for
python benchmarks/mixture_of_depths.py --device cuda --size 28m --batch 16
python benchmarks/mixture_of_depths.py --device cuda --size 1.2b --batch 16 --capacities 0.5 --profile
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import record
from profile_step import print_profile

from braidlm.core.models.accounting import model_cost
from braidlm.model.config.braid_config import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.amounts import Amount
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid

SIZES = {
    "10m": (256, 12, 4096),
    "28m": (384, 12, 16_384),
    "110m": (768, 12, 16_384),
    "350m": (1024, 24, 16_384),
    "1.2b": (2048, 24, 16_384),
    "1.7b": (4096, 8, 16_384),
}
"""Width, layers and vocabulary."""


def built(size: str, capacity: float | None, length: int, device: torch.device) -> BraidForCausalLM:
    """The model, drawn on the device; without a capacity all tokens go through all layers."""
    width, layers, vocabulary = SIZES[size]
    stage: dict[str, Any] = {"block": {"layers": layers}}
    if capacity is not None:
        stage = {"mixture_of_depths": {"layers": layers, "capacity": capacity, "every": 2}}
    block = {"attention": {"heads": width // 64}, "feed": "swiglu"}
    architecture = {"width": width, "context": length, "positions": "rope", "block": block, "stages": [stage]}
    torch.manual_seed(0)
    with device:
        return BraidForCausalLM(BraidConfig(architecture, vocab_size=vocabulary))


def step_of(model: BraidForCausalLM, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Callable:
    """A step through the code that `braid train` runs."""
    stepper = Stepper(
        TrainableBraid(model.to(device)), TrainingConfig(budget=Amount(1), batch=batch), Rank(0, 1, device), dtype
    )
    tokens = np.random.default_rng(0).integers(1, model.config.vocab_size, (batch, length + 1))
    return lambda: stepper.step(tokens[:, :-1].copy(), tokens[:, 1:].copy(), batch * length, 1e-4)


def timed(work: Callable, device: torch.device) -> tuple[float, float]:
    """Seconds of the clock and of the processor; other programs on the machine lengthen the first alone."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="10m", choices=SIZES)
    parser.add_argument("--capacities", nargs="+", type=float, default=[0.5, 0.125])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=11, help="of each model, which take turns")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each model's step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models = {capacity: built(args.size, capacity, args.length, device) for capacity in (None, *args.capacities)}
    steps = {capacity: step_of(model, args.batch, args.length, device, dtype) for capacity, model in models.items()}
    for step in steps.values():
        for _ in range(8 if device.type == "cuda" else 1):
            step()
    seconds: dict[float | None, list[tuple[float, float]]] = {capacity: [] for capacity in steps}
    for _ in range(args.steps):
        for capacity, step in steps.items():
            seconds[capacity].append(timed(step, device))
    medians = {
        capacity: [statistics.median(x) for x in zip(*pairs, strict=True)] for capacity, pairs in seconds.items()
    }
    rows = []
    for capacity, (clock, processor) in medians.items():
        cost, full = (model_cost(models[which], args.length).flops_per_token for which in (capacity, None))
        rows.append(
            {
                "size": args.size,
                "capacity": "full" if capacity is None else capacity,
                "batch": f"{args.batch} x {args.length}",
                "MFLOP per token": cost / 1e6,
                "of full": cost / full,
                "ms": clock * 1e3,
                "time of full": clock / medians[None][0],
                "processor ms": processor * 1e3,
                "processor time of full": processor / medians[None][1],
            }
        )
    if args.profile:
        for row, step in zip(rows, steps.values(), strict=True):
            print_profile(step, f"{row['size']}, capacity {row['capacity']}", kernels=40)
    record("mixture_of_depths", device, rows, args.out)


if __name__ == "__main__":
    main()
