"""Random orders that depend on their key alone: the same on every machine, in every process, for every model."""

import hashlib
import json

import numpy as np

Key = str | int | float


def raw_bits(count: int, *key: Key) -> np.ndarray:
    """`count` random uint64 for a key, from a stable hash of it."""
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    # NumPy promises that a bit generator's raw stream never changes; it does not promise that for permutation().
    return np.random.PCG64(int.from_bytes(digest, "little")).random_raw(count)


def shuffled(count: int, *key: Key) -> np.ndarray:
    """The numbers 0 .. count - 1 in the key's random order."""
    return np.argsort(raw_bits(count, *key), kind="stable")


def drawn(bound: int, *key: Key) -> int:
    """The key's random number in [0, bound)."""
    return int(raw_bits(1, *key)[0]) % bound
