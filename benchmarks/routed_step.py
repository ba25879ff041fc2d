"""Whole optimizer steps of MoEP: Braid's sparse kernels against every block computed and masked, and GPT-2 of its size.

python benchmarks/routed_step.py --device cuda
python benchmarks/routed_step.py --batches 2 --length 128      # CPU
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import compared_seconds, record
from shapes import VOCABULARY, braid_model, moep_model
from torch import nn

from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.amounts import Amount
from braidlm.training.parallel import Place
from braidlm.training.precision import autocast
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step import Stepper


def braid_step(
    model: BraidForCausalLM, batch: int, length: int, device: torch.device, dtype: torch.dtype, **options: Any
) -> Callable:
    """A step through the code that `braid train` runs."""
    config = TrainingConfig(budget=Amount(1), batch=batch, **options)
    stepper = Stepper(model.to(device), config, Place(0, 1, device), dtype)
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, (batch, length + 1))
    return lambda: stepper.step(tokens[:, :-1].copy(), tokens[:, 1:].copy(), batch * length, 1e-4)


def masked_step(batch: int, length: int, device: torch.device, dtype: torch.dtype, compiled: bool) -> Callable:
    """The plain way: every block on every token, weighted by a mask, one after another."""
    model = moep_model(length, stacked=False, compute="dense").to(device).train()
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
            "MoEP": braid_step(moep_model(length), *shape),
            "MoEP, dropout 0.1": braid_step(moep_model(length, dropout=0.1), *shape),
            "GPT-2 28M": braid_step(braid_model("gpt2", "28m", length), *shape),
        }
        if not args.no_peers:
            steps["MoEP masked, eager float32"] = masked_step(batch, length, device, torch.float32, compiled=False)
            if gpu:
                steps["MoEP masked, compiled"] = masked_step(*shape, compiled=True)
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
