"""The teachers' most probable tokens of every position of the training text, computed once and read by memory map.

A folder of the data section's cache for each data set:

    targets.json    what was stored: it is written last, so that a folder with it is complete
    ids.bin         [tokens of the packed file, k] the most probable next tokens after each
    logs.bin        [tokens of the packed file, k] float16: the logarithms of their probabilities
    progress.json   while it is written: how many tokens are done

Documents that are not trained on are holes in the files, which take no space.

The teachers read the text in sequences that overlap by half, so that each token has at least half a sequence before it,
whatever sequence the training has it in.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors, sha256_of, write_json
from braidlm.core.locks import locked_folder
from braidlm.core.reading import read_json
from braidlm.data.loading.streams import TokenStream
from braidlm.data.packing.packed_data import token_dtype
from braidlm.training.distill.slices import MAX_LOGITS, slices_of
from braidlm.training.distill.teachers import Teachers

MANIFEST, PROGRESS, IDS, LOGS = "targets.json", "progress.json", "ids.bin", "logs.bin"
LOG_DTYPE = np.dtype(np.float16)
SAVED_EVERY = 1 << 16
"""Tokens after which a process that is killed would not begin again."""
MAX_LOGITS_ON_GPU = 1 << 27
"""That teachers compute at once: fewer leave a GPU idle."""


class Targets(NamedTuple):
    """Of some positions: the teachers' most probable next tokens and the logarithms of their probabilities."""

    ids: np.ndarray
    """[..., k] whole numbers."""
    logs: np.ndarray
    """[..., k] floats."""


class StoredTargets:
    """Those of one packed data set, on disk."""

    def __init__(self, folder: Path, tokens: int, top_k: int, vocab_size: int, mode: Literal["r", "r+"] = "r"):
        shape = (tokens, top_k)
        self.ids = _mapped(folder / IDS, token_dtype(vocab_size), shape, mode)
        self.logs = _mapped(folder / LOGS, LOG_DTYPE, shape, mode)

    def at(self, positions: np.ndarray) -> Targets:
        """Of the tokens at file positions [row, time]."""
        return Targets(self.ids[positions], self.logs[positions])

    def put(self, positions: np.ndarray, targets: Targets) -> None:
        """Write those of file positions."""
        self.ids[positions], self.logs[positions] = targets

    def flush(self) -> None:
        """When this returns, what was written is on disk."""
        self.ids.flush()
        self.logs.flush()


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

    def folder(self, stream: TokenStream) -> Path:
        """Its name changes with everything that the content depends on."""
        text = {"tokens": sha256_of(stream.data.folder / "tokens.bin"), "stream": stream.fingerprint()}
        key = {**text, "length": self.length, "top_k": self.top_k, **self.facts}
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.cache / f"{stream.name}-teachers-{digest[:12]}"


def open_targets(
    streams: Sequence[TokenStream], plan: StoragePlan, load: Callable[[], Teachers], device: torch.device
) -> dict[str, StoredTargets]:
    """By the stream's name; what is not there yet is computed by the teachers, which are loaded only for that."""
    opened: dict[str, StoredTargets] = {}
    teachers: Teachers | None = None
    for stream in streams:
        folder = plan.folder(stream)
        if not (folder / MANIFEST).is_file():
            teachers = teachers or load()
            with explained_disk_errors(folder):
                _store(stream, folder, plan, teachers, device)
        opened[stream.name] = StoredTargets(folder, stream.data.manifest.tokens, plan.top_k, plan.vocab_size)
    return opened


def _store(stream: TokenStream, folder: Path, plan: StoragePlan, teachers: Teachers, device: torch.device) -> None:
    """Compute and write what is missing of a folder."""
    # In the order of the file, whatever order they are trained in.
    stream = TokenStream(stream.data, stream.subset, stream.name)
    with locked_folder(folder):
        if (folder / MANIFEST).is_file():  # by another run that was waited for
            return
        done = saved = int(read_json(folder / PROGRESS)["done"]) if (folder / PROGRESS).is_file() else 0
        size = plan.top_k * (token_dtype(plan.vocab_size).itemsize + LOG_DTYPE.itemsize)
        _check_space(folder, size * (len(stream) - done))
        stored = StoredTargets(folder, stream.data.manifest.tokens, plan.top_k, plan.vocab_size, "r+")
        console.say(
            f"Storing the {plan.top_k} tokens that the teachers find most probable after each of {len(stream):,} "
            f"tokens of {stream.name} ({size * len(stream) / 1e6:,.0f} MB) in {folder}."
        )
        with console.progress(stream.name, len(stream), "tokens", done) as advance:
            for positions, targets in _blocks(stream, plan, teachers, device, done):
                stored.put(positions, targets)
                done += len(positions)
                advance(done, "")
                if done - saved >= SAVED_EVERY or done == len(stream):
                    stored.flush()
                    write_json(folder / PROGRESS, {"done": done})
                    saved = done
        write_json(folder / MANIFEST, {"tokens": len(stream), "top_k": plan.top_k, **plan.facts})
        (folder / PROGRESS).unlink(missing_ok=True)


def _blocks(
    stream: TokenStream, plan: StoragePlan, teachers: Teachers, device: torch.device, done: int
) -> Iterator[tuple[np.ndarray, Targets]]:
    """File positions of the stream's tokens from `done` on, some sequences at a time, and what follows each."""
    before = plan.length // 2
    starts = np.arange(done, len(stream), plan.length - before)
    max_logits = MAX_LOGITS_ON_GPU if device.type == "cuda" else MAX_LOGITS
    for part in slices_of(len(starts), plan.length, plan.vocab_size, max_logits):
        positions = stream.positions((starts[part] - before) % len(stream), plan.length)
        ids = torch.from_numpy(stream.tokens_at(positions)).to(device)
        best = teachers.read(ids).log_probabilities[:, before:].flatten(0, 1).topk(plan.top_k)
        left = len(stream) - int(
            starts[part][0]
        )  # the stream is circular: the last sequence may read on from its begin
        targets = Targets(best.indices[:left].cpu().numpy(), best.values[:left].cpu().numpy())
        yield positions[:, before:].reshape(-1)[:left], targets


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BraidError(
            f"the teachers' tokens need {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free",
            str(folder),
            "Take a smaller training.distill.top_k, or another data.cache.",
        )


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, int], mode: Literal["r", "r+"]) -> np.memmap:
    expected = math.prod(shape) * dtype.itemsize
    if mode == "r+":
        with open(path, "ab") as file:
            file.truncate(expected)
    if not path.is_file() or path.stat().st_size != expected:
        raise BraidError(
            f"{path.name} is not of the size that it was written with",
            str(path.parent),
            "The folder is damaged: remove it, and the teachers compute it again.",
        )
    return np.memmap(path, dtype=dtype, mode=mode, shape=shape)
