"""One step of a preset's optimizers, clipping included: AdamW, Muon by kernels, by operations, and torch.optim.Muon.

python benchmarks/optimizer_step.py                                  # routed-28m and rotary-28m, on a GPU
python benchmarks/optimizer_step.py models/routed-28m --profile      # with the kernels of Muon's steps
python benchmarks/optimizer_step.py --sweep                          # Newton-Schulz with other blocks

Each is replayed as a CUDA graph. `torch.optim.Muon` trains matrices only, so each member of a bank is a parameter.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import compared_seconds, record
from preset_step import preset_model
from profile_step import print_profile
from torch import Tensor, nn, optim
from triton.runtime.errors import OutOfResources

from braidlm.kernels.ops.launch import Blocks
from braidlm.kernels.optimizers.fused_step import FusedStep
from braidlm.kernels.optimizers.newton_schulz import BLOCKS, NewtonSchulz, ProductBlocks
from braidlm.model.config.registry import Choice
from braidlm.training.step.optimizers.contract import OptimizerConfig, optimizers
from braidlm.training.step.optimizers.muon import MuonConfig
from braidlm.training.trainable import TrainableBraid

CHOICES = {"adamw": Choice("adamw", OptimizerConfig()), "muon": Choice("muon", MuonConfig())}
SQUARES = [Blocks(size, size, 64, warps, stages) for size in (64, 128) for warps in (4, 8) for stages in (2, 3, 4)]
SWEPT = {
    "symmetric": [*SQUARES, Blocks(64, 64, 32, 4, 5), Blocks(128, 128, 32, 8, 4), Blocks(128, 128, 128, 8, 2)],
    "wide": [
        *SQUARES,
        *(Blocks(m, n, 64, warps, s) for m, n in ((64, 128), (128, 64)) for warps in (4, 8) for s in (2, 3, 4)),
        Blocks(128, 128, 32, 8, 4),
        Blocks(64, 128, 32, 4, 4),
        Blocks(64, 128, 128, 4, 2),
    ],
}


def give_gradients(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def parts_of(preset: str, kind: str, device: torch.device) -> list[optim.Optimizer]:
    """The torch optimizers that train a preset, with gradients; rates are tensors, as in a captured step."""
    torch.manual_seed(0)
    model = preset_model(preset).to(device)
    give_gradients(list(model.parameters()))
    return optimizers.build(CHOICES[kind], model, TrainableBraid(model).matrices(), True).parts


def of_kernels(parts: list[optim.Optimizer]) -> Callable[[], Any]:
    fused = FusedStep(parts)
    for part in parts:  # they make their state
        part.step()
    return captured(lambda: fused.step(1.0), fused.write_addresses)


def of_operations(parts: list[optim.Optimizer]) -> Callable[[], Any]:
    """Torch's clipping and the steps of the optimizers themselves."""
    parameters = [p for part in parts for group in part.param_groups for p in group["params"]]

    def step() -> None:
        norm = nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
        for part in parts:
            part.step()

    return captured(step)


def of_torch(parts: list[optim.Optimizer]) -> Callable[[], Any]:
    adamw, muon = parts
    banks = [p.detach() for group in muon.param_groups for p in group["params"]]
    matrices = [nn.Parameter(m) for bank in banks for m in (bank if bank.ndim == 3 else [bank])]
    give_gradients(list(matrices))
    return of_operations([adamw, optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw")])


def captured(step: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> Callable[[], Any]:
    """The step as a graph, with the tensors that it reads; `after` follows the capture."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    after()
    return partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, _holds_tensors: Callable[[], Any]) -> None:
    graph.replay()


def compared(preset: str, device: torch.device, calls: int, profiled: bool) -> list[dict[str, Any]]:
    makers = {
        "adamw, kernels": of_kernels,
        "muon, kernels": of_kernels,
        "muon, operations": of_operations,
        "muon, torch.optim.Muon": of_torch,
    }
    steps = {name: make(parts_of(preset, name.split(",")[0], device)) for name, make in makers.items()}
    if profiled:
        for name in ("muon, kernels", "muon, operations"):
            print_profile(steps[name], f"{name}, {preset}")
    seconds = compared_seconds(steps, calls, 2, device)
    return [{"preset": preset, "step": name, "ms": value * 1e3} for name, value in seconds.items()]


def swept(preset: str, device: torch.device, calls: int) -> list[dict[str, Any]]:
    """Newton-Schulz alone, with other blocks for one kind of products of one unit at a time."""
    _, muon = parts_of(preset, "muon", device)
    parameters = [p for group in muon.param_groups for p in group["params"]]
    shapes = [tuple(p.shape[-2:]) for p in parameters for _ in range(len(p) if p.ndim == 3 else 1)]
    runs = {"as it is": newton_schulz(shapes, device, BLOCKS)}
    for unit in sorted({place.unit for place in NewtonSchulz(shapes, device).places}):
        for kind, candidates in SWEPT.items():
            for blocks in [b for b in candidates if max(b.rows, b.columns, b.inner) <= unit]:
                chosen: ProductBlocks = BLOCKS[unit]._replace(**{kind: blocks})
                try:
                    runs[f"{unit}, {kind}: {blocks}"] = newton_schulz(shapes, device, {**BLOCKS, unit: chosen})
                except OutOfResources:
                    print(f"{unit}, {kind}: {blocks} does not fit")
    seconds = compared_seconds(runs, calls, 2, device, rounds=3)
    ordered = sorted(seconds.items(), key=lambda item: item[1])
    return [{"preset": preset, "blocks": name, "ms": value * 1e3} for name, value in ordered]


def newton_schulz(shapes: Any, device: torch.device, blocks: dict[int, ProductBlocks]) -> Callable[[], Any]:
    iterations = NewtonSchulz(shapes, device, blocks)
    stack = torch.randn(iterations.elements, device=device).bfloat16()
    scales = torch.full((len(shapes),), 1e-3, device=device)
    return captured(partial(iterations.run, stack, scales, 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", default=["models/routed-28m", "models/rotary-28m"])
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print the kernels of each preset's steps with Muon")
    parser.add_argument("--sweep", action="store_true", help="Newton-Schulz alone, with other blocks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for preset in args.presets:
        rows += swept(preset, device, args.calls) if args.sweep else compared(preset, device, args.calls, args.profile)
    record("newton_schulz" if args.sweep else "optimizer_step", device, rows, args.out)


if __name__ == "__main__":
    main()
