"""Seeded choices for the built-in corpora: the same on every machine, and never the same document twice in a row."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Dice:
    """Choices drawn from a seed that is a string.

    Only `Random.random` is used: its sequence is the one that Python promises to keep between versions.
    """

    __slots__ = ("chance",)

    def __init__(self, seed: str):
        self.chance = random.Random(seed).random

    def pick(self, choices: Sequence[T]) -> T:
        """One of the choices."""
        return choices[int(self.chance() * len(choices))]

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.chance() * (high - low + 1))

    def split(self, total: int, choices: Sequence[T]) -> list[T]:
        """`total` different choices, in a random order."""
        left = list(choices)
        return [left.pop(int(self.chance() * len(left))) for _ in range(total)]


def spread(seed: int, index: int, sizes: tuple[int, ...]) -> list[int]:
    """One number below each size; no combination comes back within prod(sizes) consecutive indices.

    A document that shows all of them is thereby different from its neighbours by construction, not by luck.
    """
    digits = []
    for size in sizes:
        index, digit = divmod(index, size)
        digits.append(digit)
    # Turning each digit by an amount that the others decide can be undone, so it maps combinations one to one;
    # a few rounds leave no pattern in the order, and every worker that takes each n-th document meets them all.
    for turn in range(3):
        for place, size in enumerate(sizes):
            digit, digits[place] = digits[place], 0
            noise = seed + turn
            for rest in digits:
                noise = ((noise ^ rest) * 0x9E3779B97F4A7C15) & _MASK
                noise ^= noise >> 29
            digits[place] = (digit + noise) % size
    return digits
