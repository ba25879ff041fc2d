"""Losses of one training by the fused kernels, by plain operations in bf16 and by plain operations in float32.

The same weights, batches and rates; the tokens follow a hidden rule, so that there is something to learn.

python benchmarks/loss_curves.py --device cuda
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from measure import record
from shapes import VOCABULARY, braid_model

from braidlm.training.amounts import Amount
from braidlm.training.recipe import TrainingConfig
from braidlm.training.step.parallel import Rank
from braidlm.training.step.step import Stepper
from braidlm.training.trainable import TrainableBraid


def batches(steps: int, batch: int, length: int) -> list[np.ndarray]:
    """Each token is its predecessor's successor under one of two fixed permutations, or, now and then, any token."""
    random = np.random.default_rng(0)
    rules = np.stack([random.permutation(VOCABULARY) for _ in range(2)])
    made = []
    for _ in range(steps):
        tokens = random.integers(0, VOCABULARY, (batch, length + 1))
        for place in range(1, length + 1):
            follows = random.random(batch) < 0.9
            rule = rules[(random.random(batch) < 0.2).astype(int), tokens[:, place - 1] % 512]
            tokens[:, place] = np.where(follows, rule, tokens[:, place])
        made.append(tokens)
    return made


def losses(
    family: str, data: list[np.ndarray], peak: float, dtype: torch.dtype, fused: bool, device: torch.device
) -> np.ndarray:
    torch.manual_seed(0)
    model = braid_model(family, "28m", data[0].shape[1] - 1).to(device)
    graph = None if fused else False  # kernels serve replayed steps only
    config = TrainingConfig(budget=Amount(len(data)), batch=len(data[0]), compile=False, graph=graph)
    stepper = Stepper(TrainableBraid(model), config, Rank(0, 1, device), dtype)
    curve = []
    for index, tokens in enumerate(data):
        rate = peak * min(1.0, (index + 1) / 40)
        count = tokens[:, 1:].size
        curve.append(stepper.step(tokens[:, :-1].copy(), tokens[:, 1:].copy(), count, rate).loss)
    return torch.stack(curve).cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--families", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    data = batches(args.steps, args.batch, args.length)
    rows = []
    for family in args.families:
        runs = {
            "fused": losses(family, data, args.rate, torch.bfloat16, True, device),
            "plain bf16": losses(family, data, args.rate, torch.bfloat16, False, device),
            "plain float32": losses(family, data, args.rate, torch.float32, False, device),
        }
        for name, curve in runs.items():
            rows.append(
                {
                    "family": family,
                    "what": name,
                    "first": float(curve[0]),
                    "half way": float(curve[len(curve) // 2]),
                    "mean of last 20": float(curve[-20:].mean()),
                    "mean distance to float32": float(np.abs(curve - runs["plain float32"]).mean()),
                    "largest distance to float32": float(np.abs(curve - runs["plain float32"]).max()),
                    "largest distance to plain bf16": float(np.abs(curve - runs["plain bf16"]).max()),
                }
            )
    record("loss_curves", device, rows, args.out)


if __name__ == "__main__":
    main()
