"""Where the time of one replayed training step goes: the kernels that take most of it.

python benchmarks/profile_step.py --device cuda --batch 16
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from train_step import braid_step

CALLS = 5


def print_profile(call: Callable[[], Any], title: str, kernels: int = 25) -> None:
    """The kernels of one call on a GPU, the longest first; the call has been warmed up."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(
                event.device_time_total if hasattr(event, "device_time_total") else event.cuda_time_total
            )
    total = sum(map(sum, times.values())) / CALLS
    print(f"{total / 1e3:.3f} ms of kernels per call: {title}")
    for name, spent in sorted(times.items(), key=lambda item: -sum(item[1]))[:kernels]:
        print(f"{sum(spent) / CALLS / 1e3:8.3f} ms  {len(spent) // CALLS:4d} x  {name[:130]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--family", default="gpt2")
    parser.add_argument("--size", default="28m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--kernels", type=int, default=25)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    step = braid_step(args.family, args.size, args.batch, args.length, device, dtype)
    for _ in range(8):
        step()
    print_profile(step, f"{args.family} {args.size}, batch {args.batch} x {args.length}", args.kernels)


if __name__ == "__main__":
    main()
