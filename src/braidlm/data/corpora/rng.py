"""Seeded random choices for the built-in corpora: the same on every machine, different for neighbouring documents."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Rng:
    """A random number generator seeded by a string.

    It uses only `Random.random`, because Python keeps the sequence of that method between versions.
    """

    __slots__ = ("random",)

    def __init__(self, seed: str):
        self.random = random.Random(seed).random

    def choice(self, choices: Sequence[T]) -> T:
        """One of the choices."""
        return choices[int(self.random() * len(choices))]

    def randint(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.random() * (high - low + 1))

    def sample(self, choices: Sequence[T], count: int) -> list[T]:
        """`count` different choices, in a random order."""
        remaining = list(choices)
        return [remaining.pop(int(self.random() * len(remaining))) for _ in range(count)]


def spread(seed: int, index: int, sizes: tuple[int, ...]) -> list[int]:
    """One number below each size; no combination is repeated within prod(sizes) consecutive indices.

    Documents that show all of these numbers therefore differ from their neighbours by construction.
    """
    digits = []
    for size in sizes:
        index, digit = divmod(index, size)
        digits.append(digit)
    # Shifting each digit by a hash of the others is invertible, so it maps combinations one to one. A few rounds
    # leave no pattern in the order, so that a worker that takes every n-th document meets all of them.
    for round_number in range(3):
        for position, size in enumerate(sizes):
            digit, digits[position] = digits[position], 0
            noise = seed + round_number
            for other in digits:
                noise = ((noise ^ other) * 0x9E3779B97F4A7C15) & _MASK
                noise ^= noise >> 29
            digits[position] = (digit + noise) % size
    return digits
