"""The speed of a training: measured while it runs, and before it about how long it takes on this machine."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from braidlm.core.devices import choose_device
from braidlm.training.amounts import Amount, Pace, Unit
from braidlm.training.machines import PEAK_BF16

TOKENS_PER_WORD = 1.4
"""The tokens of an English word under a tokenizer of 16k tokens: assumed until the data is prepared."""
SHARE_OF_PRODUCTS = 0.3
"""What training reaches of the speed of large matrix products; small models on many cores reach less."""
TRAINING_FLOPS = 3  # forward and backward pass, in forward passes


class SpeedMeter:
    """Tokens per second since the last reading, and the share of the hardware's peak that this is."""

    def __init__(self, flops_per_token: int, device: torch.device, processes: int):
        self.training_flops = TRAINING_FLOPS * flops_per_token
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = next((peak for name, peak in PEAK_BF16.items() if name in gpu), None)
        self.processes = processes
        self.device = device
        self.seconds = self.cores = 0.0
        """How long training took before the last reading, and the CPU time of this process in each of its seconds."""
        self.start(0)

    def read(self, tokens: int) -> dict[str, Any]:
        """The speed since the last call; `tokens` is the total so far."""
        self.seconds = max(time.perf_counter() - self.since, 1e-9)
        self.cores = (time.process_time() - self.cpu) / self.seconds
        rate = (tokens - self.tokens) / self.seconds
        self.start(tokens)
        facts: dict[str, Any] = {"tokens_per_second": round(rate, 1)}
        if self.peak is not None:
            facts["utilisation"] = round(rate * self.training_flops / (self.peak * self.processes), 4)
        return facts

    def start(self, tokens: int) -> None:
        """Measure from here on."""
        self.since, self.cpu, self.tokens = time.perf_counter(), time.process_time(), tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work in it is not training, and does not count."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # steps that still run are training
        since, cpu = time.perf_counter(), time.process_time()
        yield
        self.since += time.perf_counter() - since
        self.cpu += time.process_time() - cpu


def training_seconds(
    tokens: int, held_out: int, last: Mapping[Unit, int], every: Pace, flops_per_token: int, flops_per_second: float
) -> float:
    """Within a factor of about two; `flops_per_token` is of a forward pass. A validation reads the `held_out` tokens
    at each mark of its pace before the `last` word, token or step, and at the end."""
    validations = every.marks_before(last[every.unit]) + 1
    return (TRAINING_FLOPS * tokens + validations * held_out) * flops_per_token / flops_per_second


def tokens_of(budget: Amount, tokens_per_step: int, tokens_per_word: float = TOKENS_PER_WORD) -> int:
    """The tokens of an amount in any unit."""
    return round(budget.count * {"steps": tokens_per_step, "words": tokens_per_word, "tokens": 1}[budget.unit])


def training_speed() -> float:
    """FLOPs per second that training is expected to reach on the device that `auto` chooses."""
    return SHARE_OF_PRODUCTS * _product_speed(choose_device("auto"))


def _product_speed(device: str, size: int = 1024) -> float:
    """FLOPs per second of a large matrix product, the best of a few, in the type that training uses there."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    matrix, seconds = torch.randn(size, size, device=device, dtype=dtype), []
    for _ in range(4):  # the first also starts the library
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
