"""Batches of about equally long texts, so that little is filled up; in few shapes, so that steps can be replayed."""

from collections.abc import Iterator

import numpy as np

TOGETHER = 50
"""Batches whose texts are sorted among each other: enough to find equals, few enough to keep chance in it."""
WIDTH_STEP = {"cuda": 32, "cpu": 8}
"""Batches are filled up to multiples of it."""
PLACES = {"cuda": 65_536, "cpu": 2_048}
"""Places of one pass where nothing is learned."""


def width_step(device: str) -> int:
    return WIDTH_STEP.get(device, WIDTH_STEP["cpu"])


def rounded(length: int, step: int, most: int) -> int:
    """The width of a batch whose longest text has this length."""
    return min(most, -(-length // step) * step)


def training_batches(lengths: np.ndarray, size: int, dice: np.random.Generator) -> list[np.ndarray]:
    """One epoch in an order of its own: every batch full; what is left over rests this time."""
    size = min(size, len(lengths))
    order = dice.permutation(len(lengths))[: len(lengths) // size * size]
    batches = []
    for at in range(0, len(order), size * TOGETHER):
        some = order[at : at + size * TOGETHER]
        batches += np.split(some[np.argsort(lengths[some], kind="stable")], len(some) // size)
    return [batches[index] for index in dice.permutation(len(batches))]


def reading_batches(lengths: np.ndarray, places: int, step: int, most: int) -> Iterator[np.ndarray]:
    """Every text once, from the shortest to the longest."""
    order = np.argsort(lengths, kind="stable")
    begin = 0
    while begin < len(order):
        stop = begin + 1
        while stop < len(order) and rounded(lengths[order[stop]], step, most) * (stop + 1 - begin) <= places:
            stop += 1
        yield order[begin:stop]
        begin = stop
