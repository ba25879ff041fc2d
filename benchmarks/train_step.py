"""Whole optimizer steps of Braid against transformers' GPT-2 and Llama of the same shape, in one run.

python benchmarks/train_step.py                     # CPU
python benchmarks/train_step.py --device cuda       # bf16, compiled; ours also replays the step as a graph
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import compared_seconds, record
from shapes import VOCABULARY, braid_model, peer_model
from torch import nn

from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.amounts import Amount
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.compute import autocast
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid


def step_of_ours(
    model: BraidForCausalLM, batch: int, length: int, device: torch.device, dtype: torch.dtype
) -> Callable:
    """A step through the code that `braid train` runs."""
    stepper = Stepper(
        TrainableBraid(model.to(device)), TrainingConfig(budget=Amount(1), batch=batch), Rank(0, 1, device), dtype
    )
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (batch, length + 1))
    return lambda: stepper.step(tokens[:, :-1].copy(), tokens[:, 1:].copy(), batch * length, 1e-4)


def step_of_torch(
    model: Any, batch: int, length: int, device: torch.device, dtype: torch.dtype, compiled: bool
) -> Callable:
    """The same step around any model of transformers' interface: fused AdamW, clipping, autocast."""
    model = model.to(device).train()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(1, VOCABULARY, (batch, length), device=device)

    def step() -> None:
        with autocast(device, dtype):
            loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def braid_step(family: str, size: str, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Callable:
    torch.manual_seed(0)
    return step_of_ours(braid_model(family, size, length), batch, length, device, dtype)


def peer_step(
    family: str, size: str, batch: int, length: int, device: torch.device, dtype: torch.dtype, compiled: bool
) -> Callable:
    torch.manual_seed(0)
    return step_of_torch(peer_model(family, size, length), batch, length, device, dtype, compiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--families", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--size", default="28m")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--no-eager", action="store_true", help="leave out transformers without torch.compile")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    length = args.length or (512 if gpu else 256)
    calls, warmup = args.steps or (20 if gpu else 1), 8 if gpu else 1
    rows = []
    for family in args.families:
        for batch in args.batches or ([16, 128] if gpu else [4]):
            tokens = batch * length
            shape = (family, args.size, batch, length, device, dtype)
            torch.compiler.reset()
            steps = {"braid": braid_step(*shape)}
            if not (gpu and args.no_eager):
                steps["transformers"] = peer_step(*shape, compiled=False)
            if gpu:
                steps["transformers compiled"] = peer_step(*shape, compiled=True)
            seconds = compared_seconds(steps, calls, warmup, device)
            best_peer = min(value for name, value in seconds.items() if name != "braid")
            for name, value in seconds.items():
                rows.append(
                    {
                        "family": family,
                        "size": args.size,
                        "batch": f"{batch} x {length}",
                        "what": name,
                        "ms": value * 1e3,
                        "tokens_per_second": tokens / value,
                        "ratio_to_best_peer": best_peer / value,
                    }
                )
    record("train_step", device, rows, args.out)


if __name__ == "__main__":
    main()
