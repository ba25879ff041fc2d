"""About how long a training takes on this machine: its FLOPs by the speed of large products."""

import time

import torch

from braidlm.core.devices import choose_device
from braidlm.training.amounts import Amount

TOKENS_PER_WORD = 1.4
"""Of English under a tokenizer of 16k tokens: assumed until the data is prepared."""
SHARE_OF_PRODUCTS = 0.3
"""What training reaches of the speed of large matrix products; small models on many cores reach less."""
TRAINING_FLOPS = 3
"""Forward and backward pass, in forward passes."""


def training_seconds(tokens: int, flops_per_token: int, flops_per_second: float) -> float:
    """Within a factor of about two; `flops_per_token` is of a forward pass."""
    return TRAINING_FLOPS * tokens * flops_per_token / flops_per_second


def tokens_of(budget: Amount, tokens_per_step: int, tokens_per_word: float = TOKENS_PER_WORD) -> int:
    """The tokens of an amount in any unit."""
    return round(budget.count * {"steps": tokens_per_step, "words": tokens_per_word, "tokens": 1}[budget.unit])


def training_speed() -> float:
    """FLOPs per second that training is expected to reach on the device that `auto` chooses."""
    return SHARE_OF_PRODUCTS * _product_speed(choose_device("auto"))


def _product_speed(device: str, size: int = 1024, repeats: int = 3) -> float:
    """FLOPs per second of a large matrix product, the best of a few, in the type that training uses there."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats + 1):  # the first also starts the library
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for a GPU
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
