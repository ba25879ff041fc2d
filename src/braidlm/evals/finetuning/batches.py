"""Batches of texts of similar length, so that padding is short; in few shapes, so that graphs can be replayed."""

from collections.abc import Iterator

import numpy as np

SORTED_TOGETHER = 50
"""Batches whose texts are sorted by length together: enough to match lengths, few enough to stay random."""
WIDTH_MULTIPLE = {"cuda": 32, "cpu": 8}
"""Batches are padded to multiples of it."""
TOKENS_PER_PASS = {"cuda": 65_536, "cpu": 2_048}
"""Tokens of one forward pass without gradients."""


def width_multiple(device: str) -> int:
    return WIDTH_MULTIPLE.get(device, WIDTH_MULTIPLE["cpu"])


def padded_width(length: int, multiple: int, max_length: int) -> int:
    """The width of a batch whose longest text has this length."""
    return min(max_length, -(-length // multiple) * multiple)


def training_batches(lengths: np.ndarray, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The batches of one epoch in random order; all are full, and the remaining texts are left out."""
    size = min(size, len(lengths))
    order = rng.permutation(len(lengths))[: len(lengths) // size * size]
    batches = []
    for start in range(0, len(order), size * SORTED_TOGETHER):
        group = order[start : start + size * SORTED_TOGETHER]
        batches += np.split(group[np.argsort(lengths[group], kind="stable")], len(group) // size)
    return [batches[index] for index in rng.permutation(len(batches))]


def evaluation_batches(lengths: np.ndarray, max_tokens: int, multiple: int, max_length: int) -> Iterator[np.ndarray]:
    """Every text once, from the shortest to the longest."""
    order = np.argsort(lengths, kind="stable")
    begin = 0
    while begin < len(order):
        stop = begin + 1
        while stop < len(order):
            width = padded_width(lengths[order[stop]], multiple, max_length)
            if width * (stop + 1 - begin) > max_tokens:
                break
            stop += 1
        yield order[begin:stop]
        begin = stop
