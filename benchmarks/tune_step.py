"""What another shape of a model, or another constant of a kernel, makes of a whole optimizer step.

Each preset, with overrides after it, is timed as it is. Then every `--try` is made on top of those that gained before
it: MODULE:NAME=EXPRESSION of a module within `braidlm.kernels`, in which `Blocks` and `WeightLayout` are known, or
several that belong together with ";" between them. All that is compared takes turns in the same rounds, with the last
preset, which nothing is tried on, among them.

python benchmarks/tune_step.py --device cuda "models/routed-28m" "models/rotary-28m" \
    --try "dispatching:MAX_FEW=8; routed.router:MAX_FEW=8" \
    --try "routed.grouped.blocks:UNEVEN_BLOCKS=Blocks(64, 128, 64, 4, 3)"
python benchmarks/tune_step.py --device cuda "models/routed-28m width=512" "models/rotary-28m width=512"
"""

import argparse
import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from measure import compared_seconds, record
from profile_step import print_profile
from train_step import step_of_ours

from braidlm.core.models.presets import config_from
from braidlm.model.modeling_braid import BraidForCausalLM

GAIN = 0.997
"""What a change must bring a step to, of its time without, to be kept: less is within what rounds differ by."""
WARMUP = 8


@contextlib.contextmanager
def changed(changes: Sequence[str]) -> Iterator[None]:
    """Constants of kernels as the changes have them."""
    from braidlm.kernels.ops.launch import Blocks
    from braidlm.kernels.routed.grouped.weights import WeightLayout

    with contextlib.ExitStack() as stack:
        for change in ";".join(changes).split(";") if changes else []:
            where, expression = change.split("=", 1)
            module, name = where.strip().split(":")
            value = eval(expression, {"Blocks": Blocks, "WeightLayout": WeightLayout})
            stack.enter_context(mock.patch.object(importlib.import_module(f"braidlm.kernels.{module}"), name, value))
        yield


def ready_step(preset: str, changes: Sequence[str], args: argparse.Namespace) -> Callable:
    """A step that has run: where it is replayed, its kernels are those that the changes chose."""
    name, *overrides = preset.split()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with changed(changes):
        step = step_of_ours(BraidForCausalLM(config_from(name, overrides)), args.batch, args.length, device, dtype)
        for _ in range(WARMUP):
            step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", help="with overrides, as one text: 'models/routed-28m width=512'")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="MODULE:NAME=EXPRESSION")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print the kernels of the fastest step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if len(args.presets) < 2:
        parser.error("give at least two presets: the last is what the others are compared with")
    device = torch.device(args.device)
    *tuned, twin = args.presets
    kept: dict[str, list[str]] = {preset: [] for preset in tuned}
    steps = {preset: ready_step(preset, (), args) for preset in args.presets}
    seconds = compared_seconds(steps, args.steps, 0, device)
    rows = [row(preset, [], seconds[preset], seconds[twin]) for preset in args.presets]
    print(*rows, sep="\n", flush=True)
    for change in args.tries:
        for preset in tuned:
            other = ready_step(preset, [*kept[preset], change], args)
            pair = {"before": steps[preset], "after": other, "twin": steps[twin]}
            found = compared_seconds(pair, args.steps, 0, device)
            rows.append(row(preset, [*kept[preset], change], found["after"], found["twin"], found["before"]))
            print(rows[-1], flush=True)
            if found["after"] < GAIN * found["before"]:
                kept[preset].append(change)
                steps[preset], seconds[preset] = other, found["after"]
    best = min(tuned, key=lambda preset: seconds[preset])
    print(f"Fastest: {best}, with {kept[best] or 'nothing changed'}, {seconds[best] * 1e3:.3f} ms")
    if args.profile:
        print_profile(steps[best], best)
    record("tune_step", device, rows, args.out)


def row(preset: str, changes: Sequence[str], seconds: float, twin: float, before: float | None = None) -> dict:
    return {
        "preset": preset,
        "changes": "; ".join(changes) or "-",
        "ms": seconds * 1e3,
        "ms_before_the_last_change": "-" if before is None else before * 1e3,
        "ratio_to_twin": seconds / twin,
    }


if __name__ == "__main__":
    main()
