"""What all built-in corpora are made from: seeded choices, the same on every machine, and the names of people."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Rng:
    """A random number generator seeded by a string.

    It uses only `Random.random`, because Python keeps the sequence of that method between versions.
    """

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


def cast(seed: int, index: int, kinds: int) -> tuple[int, int, int]:
    """One of so many kinds of documents, and the numbers of two different people; see `spread`.

    Kind and people show in every document, so that neighbours differ for certain; all else is random.
    """
    kind, first, second = spread(seed, index, cast_sizes(kinds))
    return kind, first, second + (second >= first)


def cast_sizes(kinds: int) -> tuple[int, int, int]:
    """How many choices `cast` has for each of its numbers."""
    return kinds, len(NAMES), len(NAMES) - 1


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


GIRLS = words(
    "Lily Mia Anna Emma Sara Ella Lucy Zoe Nora Clara Alice Amy Julia Maya Ruby Sophie Hannah Leah Eva Molly Nina "
    "Olivia Rosa Tina Wendy Kate Jane Ida Elsa Greta Heidi Polly Betty Carla Dora Fiona Gina Helen Jenny Kim Laura "
    "Mary Nelly Paula Sally Tara Vera Wanda Zara Bella"
)
BOYS = words(
    "Tom Ben Max Sam Leo Tim Jack Noah Adam Finn Oscar Peter Henry Luke Paul Oliver Hugo Jacob Liam Ethan Felix "
    "George Daniel David Simon Martin Victor Walter Eric Fred Gary Harry Ivan Joe Karl Lucian Milo Ned Otto Pablo "
    "Ralph Robert Steve Theo Toby Tony Vincent Billy Kevin Andrew"
)
NAMES = tuple((name, "she") for name in GIRLS) + tuple((name, "he") for name in BOYS)
"""(name, pronoun) of people; no name is also a common word."""
FORMS = {
    "he": ("he", "him", "his", "his", "himself"),
    "she": ("she", "her", "her", "hers", "herself"),
    "it": ("it", "it", "its", "its", "itself"),
}
"""Subject, object, possessive before a noun, possessive alone, reflexive."""


@dataclass(frozen=True)
class Person:
    """A person with the pronouns that agree."""

    name: str
    he: str
    him: str
    his: str

    @property
    def He(self) -> str:
        return self.he.capitalize()

    def __str__(self) -> str:
        return self.name


PEOPLE = tuple(Person(name, *FORMS[pronoun][:3]) for name, pronoun in NAMES)
