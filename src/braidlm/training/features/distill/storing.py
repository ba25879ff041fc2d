"""Teachers read the training text once, and their most probable tokens of every position are stored.

They read it in sequences that overlap by half, so that each token has at least half a sequence before it, whatever
sequence the training has it in. A device does not wait for the host: results come in the types of the files, without
waiting. One thread writes block after block; another makes sure every few seconds that what was written is on disk, and
only then says so in the progress file, from which a process that was killed goes on. A training reads the files by
memory map. The data section's cache has a folder for each data set:

    targets.json    what was stored: it is written last, so that a folder with it is complete
    ids.bin         [tokens of the packed file, k] the most probable next tokens after each
    logs.bin        [tokens of the packed file, k] float16: the logarithms of their probabilities
    progress.json   while it is written: how many tokens are done

Documents that are not trained on are holes in the files, which take no space.
"""

import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors, json_sha256, locked_folder, write_json
from braidlm.core.reading import read_json
from braidlm.data.loading.sharded_streams import stream_of
from braidlm.data.loading.streams import TokenStream
from braidlm.data.packing.packed_data import token_dtype
from braidlm.training.features.distill.teachers import Teachers, slices_of

MANIFEST, PROGRESS, IDS, LOGS = "targets.json", "progress.json", "ids.bin", "logs.bin"
LOG_DTYPE = np.dtype(np.float16)

MAX_LOGITS_ON_GPU = 1 << 28
"""The logits of a teacher at once, 512 MB in bf16: with fewer, the host may not launch kernels as fast as they run."""
MAX_LOGITS_ELSEWHERE = 1 << 23
"""A CPU is as fast with few, and they take only seconds: so often progress is shown and saved."""
MAX_WAITING = 2  # blocks that are being written, or wait to be: the device computes one while another is written
SAVED_EVERY = 5.0  # seconds of work that a killed process may lose


class Targets(NamedTuple):
    """The teachers' most probable next tokens at some positions, and the logarithms of their probabilities."""

    ids: np.ndarray  # [..., k] whole numbers
    logs: np.ndarray  # [..., k] floats


class StoredTargets:
    """The targets of one packed data set, on disk."""

    def __init__(self, folder: Path, tokens: int, top_k: int, vocab_size: int):
        self.ids = _mapped(folder / IDS, token_dtype(vocab_size), (tokens, top_k))
        self.logs = _mapped(folder / LOGS, LOG_DTYPE, (tokens, top_k))

    def at(self, positions: np.ndarray, out: Targets | None = None) -> Targets:
        """The targets at positions of the file, in the types of the files, in arrays `out` if given."""
        ids, logs = out or (None, None)
        # Another mode than "clip" would write into an array of its own first.
        ids = self.ids.take(positions, 0, ids, "clip")
        return Targets(ids, self.logs.take(positions, 0, logs, "clip"))


@dataclass(frozen=True)
class StoragePlan:
    """What is stored of each stream, and where."""

    cache: Path
    length: int  # tokens that the teachers read at once
    top_k: int
    vocab_size: int
    facts: dict[str, Any]  # what else the numbers depend on: the teachers by their hashes, and the temperature

    @property
    def dtypes(self) -> list[np.dtype]:
        """The types of the two files."""
        return [token_dtype(self.vocab_size), LOG_DTYPE]

    def file_sizes(self, tokens: int) -> list[int]:
        """Bytes that so many tokens take in each file."""
        return [tokens * self.top_k * dtype.itemsize for dtype in self.dtypes]

    def folder(self, stream: TokenStream) -> Path:
        """Its name changes with everything that the content depends on."""
        text = {"tokens": stream.data.sha256, "stream": stream.fingerprint()}
        digest = json_sha256({**text, "length": self.length, "top_k": self.top_k, **self.facts})
        return self.cache / f"{stream.name}-teachers-{digest[:12]}"


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, int]) -> np.ndarray:
    if not path.is_file() or path.stat().st_size != math.prod(shape) * dtype.itemsize:
        what = f"{path.name} is not of the size that it was written with"
        raise BraidError(what, str(path.parent), "The folder is damaged: remove it, and the teachers compute it again.")
    # A plain array, because NumPy's memmap class makes every gather slower.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=shape))


@dataclass(frozen=True)
class Block:
    """What follows some tokens."""

    positions: np.ndarray  # [tokens]: where they are in the file of their data set
    targets: Targets  # in the types of the files
    copied: torch.cuda.Event | None = None  # when the targets have come from the device


class TargetWriter:
    """Writes blocks in the order in which they are put."""

    def __init__(self, folder: Path, sizes: Sequence[int], done: int = 0):
        """`sizes` are the files' in bytes; `done` tokens were written before."""
        self.folder, self.sizes, self.done = folder, sizes, done
        self.files: list[FileIO] = []
        self.writing, self.saving = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.waiting: deque[Future[int]] = deque()
        self.saved: Future[Any] = self.saving.submit(bool)  # nothing yet
        self.saved_at = time.monotonic()

    def __enter__(self) -> "TargetWriter":
        # Appending makes a file where there is none, and keeps one of a process that was killed.
        for name, size in zip((IDS, LOGS), self.sizes, strict=True):
            FileIO(self.folder / name, "a").close()
            self.files.append(FileIO(self.folder / name, "r+"))
            self.files[-1].truncate(size)
        return self

    def __exit__(self, *_: object) -> None:
        self.writing.shutdown(cancel_futures=True)
        self.saving.shutdown()
        for file in self.files:
            file.close()

    def put(self, block: Block) -> None:
        """Write a block soon; an error of one before it is raised here."""
        self.waiting.append(self.writing.submit(self._write, block))
        self._wait(MAX_WAITING)
        if time.monotonic() - self.saved_at >= SAVED_EVERY and self.saved.done():
            self.saved.result()
            self.saved, self.saved_at = self.saving.submit(self._save, self.done), time.monotonic()

    def finish(self) -> None:
        """When this returns, all is on disk."""
        self._wait(0)
        self.saved.result()
        self._save(self.done)

    def _wait(self, at_most: int) -> None:
        while self.waiting and (len(self.waiting) > at_most or self.waiting[0].done()):
            self.done += self.waiting.popleft().result()

    def _write(self, block: Block) -> int:
        if block.copied is not None:
            block.copied.synchronize()
        places = block.positions
        ends = np.flatnonzero(np.diff(places) != 1) + 1
        for begin, end in pairwise([0, *ends, len(places)]):  # tokens that are neighbours in the file
            for file, values in zip(self.files, block.targets, strict=True):
                _write_at(file, int(places[begin]) * values[0].nbytes, values[begin:end])
        return len(places)

    def _save(self, done: int) -> None:
        for file in self.files:
            os.fsync(file.fileno())
        write_json(self.folder / PROGRESS, {"done": done})


def _write_at(file: FileIO, offset: int, values: np.ndarray) -> None:
    file.seek(offset)
    left = values.data.cast("B")
    while left:  # the system may write a part
        left = left[file.write(left) :]


def open_targets(
    streams: Sequence[TokenStream], plan: StoragePlan, load: Callable[[], Teachers], device: torch.device
) -> dict[str, StoredTargets]:
    """The targets of each stream by its name; what is missing the teachers compute, which are loaded only for that."""
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
    stream = stream_of(stream.data, stream.subset, stream.name)
    with locked_folder(folder):
        if (folder / MANIFEST).is_file():  # by another run that was waited for
            return
        done = int(read_json(folder / PROGRESS)["done"]) if (folder / PROGRESS).is_file() else 0
        needed, free = sum(plan.file_sizes(len(stream) - done)), shutil.disk_usage(folder).free
        if needed > free:
            what = f"the teachers' tokens need {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free"
            raise BraidError(what, str(folder), "Take a smaller training.distill.top_k, or another data.cache.")
        console.say(
            f"Storing the {plan.top_k} tokens that the teachers find most probable after each of {len(stream):,} "
            f"tokens of {stream.name} ({sum(plan.file_sizes(len(stream))) / 1e6:,.0f} MB) in {folder}."
        )
        with (
            console.progress(stream.name, len(stream), "tokens", done) as advance,
            TargetWriter(folder, plan.file_sizes(stream.data.manifest.tokens), done) as writer,
        ):
            for block in blocks(stream, plan, teachers, device, done):
                writer.put(block)
                advance(writer.done, "")
            writer.finish()
            advance(writer.done, "")
        write_json(folder / MANIFEST, {"tokens": len(stream), "top_k": plan.top_k, **plan.facts})
        (folder / PROGRESS).unlink(missing_ok=True)


def blocks(
    stream: TokenStream, plan: StoragePlan, teachers: Teachers, device: torch.device, done: int = 0
) -> Iterator[Block]:
    """What follows the stream's tokens from `done` on, some sequences at a time."""
    before = plan.length // 2
    starts = np.arange(done, len(stream), plan.length - before)
    on_gpu = device.type == "cuda"
    max_logits = MAX_LOGITS_ON_GPU if on_gpu else MAX_LOGITS_ELSEWHERE
    for part in slices_of(len(starts), plan.length - before, plan.vocab_size, max_logits):
        positions = stream.positions((starts[part] - before) % len(stream), plan.length)
        # The stream is circular: the last sequence may read on from its begin.
        left = len(stream) - int(starts[part][0])
        tokens = torch.from_numpy(stream.tokens_at(positions))
        tokens = tokens.pin_memory().to(device, non_blocking=True) if on_gpu else tokens
        best = teachers.log_probabilities(tokens, before).flatten(0, 1)[:left].topk(plan.top_k)
        stored = (
            values.to(getattr(torch, dtype.name)).to("cpu", non_blocking=True).numpy()
            for values, dtype in zip((best.indices, best.values), plan.dtypes, strict=True)
        )
        targets = Targets(*stored)
        copied = torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True)) if on_gpu else None
        yield Block(positions[:, before:].reshape(-1)[:left], targets, copied)
