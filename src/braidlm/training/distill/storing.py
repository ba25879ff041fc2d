"""Teachers read the training text once, and their most probable tokens of every position are stored.

They read it in sequences that overlap by half, so that each token has at least half a sequence before it, whatever
sequence the training has it in. A device does not wait for the host: results come in the types of the files, without
waiting, and are written by another thread.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors, write_json
from braidlm.core.locks import locked_folder
from braidlm.core.reading import read_json
from braidlm.data.loading.streams import TokenStream
from braidlm.training.distill.slices import slices_of
from braidlm.training.distill.stored import MANIFEST, PROGRESS, StoragePlan, StoredTargets, Targets
from braidlm.training.distill.target_writer import Block, TargetWriter
from braidlm.training.distill.teachers import Teachers

MAX_LOGITS_ON_GPU = 1 << 28
"""Of each teacher at once, 512 MB in bf16: with fewer, the host may not launch kernels as fast as a GPU runs them."""
MAX_LOGITS_ELSEWHERE = 1 << 23
"""A CPU is as fast with few, and they take only seconds: so often progress is shown and saved."""


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
        done = int(read_json(folder / PROGRESS)["done"]) if (folder / PROGRESS).is_file() else 0
        _check_space(folder, sum(plan.file_sizes(len(stream) - done)))
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


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BraidError(
            f"the teachers' tokens need {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free",
            str(folder),
            "Take a smaller training.distill.top_k, or another data.cache.",
        )
