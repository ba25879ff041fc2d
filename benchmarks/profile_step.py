"""Where the time of one replayed training step goes: the kernels that take most of it.

python benchmarks/profile_step.py --device cuda --batch 16
"""

import argparse
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile
from train_step import braid_step


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
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(
                event.device_time_total if hasattr(event, "device_time_total") else event.cuda_time_total
            )
    total = sum(map(sum, times.values())) / 5
    print(f"{total / 1e3:.3f} ms of kernels per step, batch {args.batch} x {args.length}")
    for name, spent in sorted(times.items(), key=lambda item: -sum(item[1]))[: args.kernels]:
        print(f"{sum(spent) / 5e3:8.3f} ms  {len(spent) // 5:4d} x  {name[:130]}")


if __name__ == "__main__":
    main()
