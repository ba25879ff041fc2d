"""Random numbers that depend only on a key: the same on every machine and in every process."""

import hashlib
import json

import numpy as np

Key = str | int | float


def raw_bits(count: int, *key: Key) -> np.ndarray:
    """`count` random uint64 for a key, from a stable hash of it."""
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    # NumPy guarantees that a bit generator's raw stream never changes, but not the results of permutation().
    return np.random.PCG64(int.from_bytes(digest, "little")).random_raw(count)


def random_permutation(count: int, *key: Key) -> np.ndarray:
    """The numbers 0 .. count - 1 in a random order."""
    return np.argsort(raw_bits(count, *key), kind="stable")


def random_integer(bound: int, *key: Key) -> int:
    """A random number in [0, bound)."""
    return int(raw_bits(1, *key)[0]) % bound
