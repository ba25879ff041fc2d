"""Whole optimizer steps of MoEP: Braid's sparse kernels against every block computed and masked, and GPT-2 of its size.

python benchmarks/routed_step.py --device cuda
python benchmarks/routed_step.py --batches 2 --length 128      # CPU
"""

import argparse
from pathlib import Path

import torch
from measure import compared_seconds, record
from shapes import braid_model, moep_model
from train_step import step_of_ours, step_of_torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--no-peers", action="store_true", help="leave out the masked models")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    length = args.length or (512 if gpu else 128)
    calls, warmup = args.steps or (20 if gpu else 1), 8 if gpu else 1
    rows = []
    for batch in args.batches or ([16, 128] if gpu else [2]):
        torch.manual_seed(0)
        shape = (batch, length, device, dtype)
        steps = {
            "MoEP": step_of_ours(moep_model(length), *shape),
            "MoEP, dropout 0.1": step_of_ours(moep_model(length, dropout=0.1), *shape),
            "GPT-2 28M": step_of_ours(braid_model("gpt2", "28m", length), *shape),
        }
        if not args.no_peers:
            masked = moep_model(length, stacked=False, compute="dense")  # every block on every token, one after another
            steps["MoEP masked, eager float32"] = step_of_torch(masked, batch, length, device, torch.float32, False)
            if gpu:
                again = moep_model(length, stacked=False, compute="dense")
                steps["MoEP masked, compiled"] = step_of_torch(again, *shape, compiled=True)
        seconds = compared_seconds(steps, calls, warmup, device)
        for name, value in seconds.items():
            rows.append(
                {
                    "batch": f"{batch} x {length}",
                    "what": name,
                    "ms": value * 1e3,
                    "tokens_per_second": batch * length / value,
                    "ratio_to_gpt2": seconds["GPT-2 28M"] / value,
                }
            )
    record("routed_step", device, rows, args.out)


if __name__ == "__main__":
    main()
