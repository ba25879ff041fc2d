"""Whole optimizer steps of presets side by side, such as a routed model beside its dense twin of equal FLOPs.

python benchmarks/preset_step.py --device cuda                                  # routed-28m beside rotary-28m
python benchmarks/preset_step.py models/moep-28m models/gpt2-28m --batches 2 --length 128       # CPU
python benchmarks/preset_step.py models/routed-28m --device cuda --profile      # with the kernels that take most time
"""

import argparse
from pathlib import Path

import torch
from measure import compared_seconds, record
from profile_step import print_profile
from train_step import step_of_ours

from braidlm.core.models.presets import config_from
from braidlm.model.modeling_braid import BraidForCausalLM


def preset_model(preset: str) -> BraidForCausalLM:
    return BraidForCausalLM(config_from(preset))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", default=["models/routed-28m", "models/rotary-28m"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", nargs="+", type=int, default=[16])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print the kernels of the first preset's step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for batch in args.batches:
        torch.manual_seed(0)
        steps = {name: step_of_ours(preset_model(name), batch, args.length, device, dtype) for name in args.presets}
        seconds = compared_seconds(steps, args.steps, 8, device)
        for name, value in seconds.items():
            rows.append(
                {
                    "preset": name,
                    "batch": f"{batch} x {args.length}",
                    "ms": value * 1e3,
                    "tokens_per_second": batch * args.length / value,
                    "ratio_to_last": value / seconds[args.presets[-1]],
                }
            )
        if args.profile:
            print_profile(steps[args.presets[0]], f"{args.presets[0]}, batch {batch} x {args.length}")
    record("preset_step", device, rows, args.out)


if __name__ == "__main__":
    main()
