"""The progress of a run and its speed."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from braidlm.core.console import count
from braidlm.training.amounts import Amount

PEAK_BF16 = {
    "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "A10G": 70e12, "A10": 125e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "RTX A6000": 155e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
"""Dense bf16 (or fp16 where there is no bf16) FLOP/s of the matrix units, by the vendors' data sheets."""


@dataclass(frozen=True)
class Progress:
    """Amounts trained so far, over all processes."""

    steps: int = 0
    tokens: int = 0
    words: int = 0

    def done(self, unit: str) -> int:
        return getattr(self, unit)

    def share(self, budget: Amount) -> float:
        """Training progress in [0, 1]."""
        return min(self.done(budget.unit) / budget.count, 1.0)

    def plus(self, tokens: int, words: int) -> "Progress":
        """The progress after one more step."""
        return Progress(self.steps + 1, self.tokens + tokens, self.words + words)


class SpeedMeter:
    """Tokens per second since the last reading, and the share of the hardware's peak that this is."""

    def __init__(self, flops_per_token: int, device: torch.device, processes: int):
        self.training_flops = 3 * flops_per_token  # the backward pass costs twice the forward
        self.peak = peak_flops(device)
        self.processes = processes
        self.seconds = self.cores = 0.0
        """How long the last reading took, and the CPU time of this process in each of its seconds."""
        self.pause(0)

    def read(self, tokens: int) -> dict[str, Any]:
        """The speed since the last call; `tokens` is the total so far."""
        self.seconds = max(time.perf_counter() - self.since, 1e-9)
        self.cores = (time.process_time() - self.cpu) / self.seconds
        rate = (tokens - self.tokens) / self.seconds
        self.pause(tokens)
        facts: dict[str, Any] = {"tokens_per_second": round(rate, 1)}
        if self.peak is not None:
            facts["utilisation"] = round(rate * self.training_flops / (self.peak * self.processes), 4)
        return facts

    def pause(self, tokens: int) -> None:
        """Restart the measurement after work that is not training."""
        self.since, self.cpu, self.tokens = time.perf_counter(), time.process_time(), tokens


def peak_flops(device: torch.device) -> float | None:
    """The peak of the device, if it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_BF16.items() if key in name), None)


def progress_note(record: dict[str, Any]) -> str:
    """The text beside the progress bar."""
    parts = [f"loss {record['loss']:.3f}", f"{count(float(record['tokens_per_second']))} tokens/s"]
    if "utilisation" in record:
        parts.append(f"MFU {record['utilisation']:.0%}")
    return "  ".join(parts)
