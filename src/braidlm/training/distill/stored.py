"""The teachers' most probable tokens of every position of the training text, read by memory map.

A folder of the data section's cache for each data set:

    targets.json    what was stored: it is written last, so that a folder with it is complete
    ids.bin         [tokens of the packed file, k] the most probable next tokens after each
    logs.bin        [tokens of the packed file, k] float16: the logarithms of their probabilities
    progress.json   while it is written: how many tokens are done

Documents that are not trained on are holes in the files, which take no space.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of
from braidlm.data.loading.streams import TokenStream
from braidlm.data.packing.packed_data import token_dtype

MANIFEST, PROGRESS, IDS, LOGS = "targets.json", "progress.json", "ids.bin", "logs.bin"
LOG_DTYPE = np.dtype(np.float16)


class Targets(NamedTuple):
    """Of some positions: the teachers' most probable next tokens and the logarithms of their probabilities."""

    ids: np.ndarray
    """[..., k] whole numbers."""
    logs: np.ndarray
    """[..., k] floats."""


class StoredTargets:
    """Those of one packed data set, on disk."""

    def __init__(self, folder: Path, tokens: int, top_k: int, vocab_size: int):
        shape = (tokens, top_k)
        self.ids = _mapped(folder / IDS, token_dtype(vocab_size), shape)
        self.logs = _mapped(folder / LOGS, LOG_DTYPE, shape)

    def at(self, positions: np.ndarray, out: Targets | None = None) -> Targets:
        """Of the tokens at file positions, which are in the file: as they are stored, in arrays `out` if given."""
        ids, logs = out or (None, None)
        # Another mode than "clip" would write into an array of its own first.
        ids = self.ids.take(positions, 0, ids, "clip")
        return Targets(ids, self.logs.take(positions, 0, logs, "clip"))


@dataclass(frozen=True)
class StoragePlan:
    """What is stored of each stream, and where."""

    cache: Path
    length: int
    """Tokens that the teachers read at once."""
    top_k: int
    vocab_size: int
    facts: dict[str, Any]
    """What else the numbers depend on: the teachers by their hashes, and the temperature."""

    @property
    def dtypes(self) -> list[np.dtype]:
        """Of the files."""
        return [token_dtype(self.vocab_size), LOG_DTYPE]

    def file_sizes(self, tokens: int) -> list[int]:
        """Bytes that so many tokens take in each file."""
        return [tokens * self.top_k * dtype.itemsize for dtype in self.dtypes]

    def folder(self, stream: TokenStream) -> Path:
        """Its name changes with everything that the content depends on."""
        text = {"tokens": sha256_of(stream.data.folder / "tokens.bin"), "stream": stream.fingerprint()}
        key = {**text, "length": self.length, "top_k": self.top_k, **self.facts}
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.cache / f"{stream.name}-teachers-{digest[:12]}"


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, int]) -> np.ndarray:
    if not path.is_file() or path.stat().st_size != math.prod(shape) * dtype.itemsize:
        raise BraidError(
            f"{path.name} is not of the size that it was written with",
            str(path.parent),
            "The folder is damaged: remove it, and the teachers compute it again.",
        )
    # A plain array, because NumPy's memmap class makes every gather slower.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=shape))
