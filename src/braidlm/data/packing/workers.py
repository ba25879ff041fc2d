"""Processes that pack shards, and the folder of unfinished work, which the same command continues.

A process is a fresh `python -m braidlm.data.packing.workers FOLDER` that reads shard indices and answers each with a
line of JSON, so that packing works from scripts, notebooks, tests and `python -c` alike.
"""

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from braidlm.core.errors import INTERRUPTIONS, BraidError
from braidlm.core.files import lock_or_refuse, lock_or_wait, make_folder, write_json, write_text
from braidlm.core.jobs import Jobs
from braidlm.core.reading import read_json, system_error
from braidlm.data.packing.filtering import kept, look
from braidlm.data.packing.packed_data import token_dtype
from braidlm.data.packing.publishing import publish_shard, published_shards
from braidlm.data.packing.shards import ShardCounts, finished_shard, pack_shard
from braidlm.data.sources.plan import ReadOptions, Shard
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.data.tokenizing.encoding import Packer

THREADS = "TOKENIZERS_PARALLELISM"
KEY, LOCK, JOB = "key", "lock", "job.json"
"""Files of the folder of unfinished work."""


@dataclass
class Job:
    """What a worker needs: the shards, how to read them, and the folder with the tokenizer and the results."""

    folder: Path
    options: ReadOptions
    shards: list[Shard]
    address: str | None = None
    """Where packed shards are written; None keeps them in the folder, to be joined."""
    key: str = ""
    """What the shards at the address were made from."""
    looks: bool = False
    """Whether documents are only looked at, to decide which are left out."""

    def save(self) -> None:
        shards = [list(asdict(shard).values()) for shard in self.shards]
        place = {"address": self.address, "key": self.key, "looks": self.looks}
        write_json(self.folder / JOB, {"reading": self.options.facts(), "shards": shards, **place})

    @classmethod
    def load(cls, folder: Path) -> "Job":
        job = read_json(folder / JOB)
        shards = [Shard(*values) for values in job["shards"]]
        return cls(folder, ReadOptions(**job["reading"]), shards, job["address"], job["key"], job["looks"])

    @property
    def results(self) -> Path:
        return self.folder / "shards"

    def filter_file(self, index: int, kind: str) -> Path:
        """What is known of a shard's documents (`look`), or which of them stay (`kept`)."""
        return self.folder / "filter" / f"{index:06d}.{kind}"

    @property
    def has_prompts(self) -> bool:
        """Whether only answers are to be predicted."""
        return self.options.answer is not None

    def packer(self) -> Packer:
        return Packer(load_tokenizer(self.folder / "tokenizer"))

    def pack(self, index: int, packer: Packer) -> ShardCounts:
        shard = self.shards[index]
        pieces = shard.format.pieces(shard, self.options)
        if self.looks:
            return ShardCounts(documents=look(pieces, self.options, self.filter_file(index, "look")))
        if self.options.filters:
            pieces = kept(pieces, np.load(self.filter_file(index, "kept"), allow_pickle=False))
        chunk, where = self.options.chunk_tokens, shard.place
        counts = pack_shard(pieces, packer, self.has_prompts, self.results, index, where, chunk)
        if self.address is None:
            return counts
        dtype = token_dtype(packer.tokenizer.vocab_size)
        return publish_shard(self.results, index, counts, dtype, self.has_prompts, self.address, self.key)

    def finished(self, vocab_size: int) -> dict[int, ShardCounts]:
        """The counts of the shards that an earlier run finished."""
        if self.address is not None:
            return published_shards(self.address, self.key, len(self.shards))
        found = {at: finished_shard(self.results, at, vocab_size, self.has_prompts) for at in range(len(self.shards))}
        return {index: counts for index, counts in found.items() if counts is not None}


def pack_all(
    job: Job, indices: Sequence[int], workers: int, jobs: Jobs
) -> Generator[tuple[int, ShardCounts], None, None]:
    """Pack shards, yielding the counts of each when it is finished. Closing the iterator stops the work.

    On a cluster each shard is a job; else so many processes of this machine pack them.
    """
    if jobs.is_remote:
        kind = "look at" if job.looks else "pack"
        started = {i: jobs.start(f"{kind} shard {i}", _pack_one, job.folder, i, gpus=0) for i in indices}
        yield from jobs.finished(started)
    elif min(workers, len(indices)) <= 1:
        packer = job.packer()
        with _tokenizer_threads(workers > 1):
            for index in indices:
                yield index, job.pack(index, packer)
    else:
        yield from _in_processes(job, indices, min(workers, len(indices)))


def _pack_one(folder: Path, index: int) -> ShardCounts:
    """A shard, packed by a process of a cluster, which keeps the job and its tokenizer for the next one."""
    os.environ[THREADS] = "false"
    job, packer = _loaded(folder.absolute(), (folder / JOB).stat().st_mtime_ns)
    return job.pack(index, packer)


@functools.lru_cache(maxsize=1)
def _loaded(folder: Path, written: int) -> tuple[Job, Packer]:
    job = Job.load(folder)
    return job, job.packer()


def _in_processes(job: Job, indices: Sequence[int], workers: int) -> Iterator[tuple[int, ShardCounts]]:
    processes: list[subprocess.Popen[str]] = []
    free: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
    threads = ThreadPoolExecutor(workers)

    def packed(index: int) -> dict[str, Any]:
        process = free.get()
        try:
            return _answer(process, index)
        finally:
            free.put(process)

    try:
        with _blocked_interruptions():
            for _ in range(workers):
                processes.append(_start_process(job.folder))
                free.put(processes[-1])
            answers = {threads.submit(packed, index): index for index in indices}
        for done in as_completed(answers):
            if "error" in (answer := done.result()):
                raise BraidError(*answer["error"])
            yield answers[done], ShardCounts(**answer)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            with contextlib.suppress(OSError), process:
                pass  # closes the pipes


def _start_process(folder: Path) -> "subprocess.Popen[str]":
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread each: the processes fill the cores.
    environment = {**os.environ, "PYTHONPATH": path, THREADS: "false", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "braidlm.data.packing.workers", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # An interrupt from the keyboard goes to this process alone, which ends its workers.
        start_new_session=True,
    )


@contextlib.contextmanager
def _blocked_interruptions() -> Iterator[None]:
    """Hold back the signals that end a command; threads and processes started meanwhile hold them back for good.

    Whoever ends a service signals each of its processes. This one says that it was interrupted, and ends its workers;
    a worker that ended by itself would look like a crash. And none is started that this process does not know of yet.
    """
    mask = getattr(signal, "pthread_sigmask", None)
    if mask is None:  # Windows cannot
        yield
        return
    before = mask(signal.SIG_BLOCK, INTERRUPTIONS)
    try:
        yield
    finally:
        mask(signal.SIG_SETMASK, before)


def _answer(process: "subprocess.Popen[str]", index: int) -> dict[str, Any]:
    """What a process answers that is told to pack a shard: its counts, or the error."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(f"{index}\n")
        process.stdin.flush()
        if (answer := process.stdout.readline()).endswith("\n"):
            return json.loads(answer)  # type: ignore[no-any-return]
    code = process.wait()
    reason = "it was killed; is there enough memory?" if code < 0 else f"exit code {code}"
    todo = (
        "Finished shards are kept: run the same command again to continue, with fewer `--workers` if memory is short."
    )
    return {"error": ["a packing process ended unexpectedly", reason, todo]}


@contextlib.contextmanager
def work_folder(out: Path, key: str, wait: bool = False) -> Iterator[Path]:
    """`OUT.part`, with the work of an earlier run of the same key; removed when the block succeeds.

    It is removed too after a user's error if it contains no finished shard yet. Where another process is at work in
    it, `wait` waits for that one to end; otherwise it is an error.
    """
    folder = out.with_name(out.name + ".part")
    with _locked(folder, wait):
        if not (folder / KEY).is_file() or (folder / KEY).read_bytes() != key.encode():
            _clear(folder)
            write_text(folder / KEY, key)
        try:
            yield folder
        except BraidError:
            if not any(folder.glob("shards/*.json")):
                _remove(folder)
            raise
        _remove(folder)


@contextlib.contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[None]:
    """Make the folder and hold its lock; the process that held it before may remove it at any moment until then."""
    while True:
        make_folder(folder)
        path = folder / LOCK
        try:
            lock = open(path, "w")  # noqa: SIM115
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not path.is_symlink():
                continue
            raise system_error(error, path) from error
        with lock:
            if wait:
                lock_or_wait(lock.fileno(), folder)
            else:
                lock_or_refuse(lock.fileno(), folder, "prepare", "`--out`")
            if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                yield
                return


def _remove(folder: Path) -> None:
    """Remove the folder, and last its lock; it stays if another process locks it anew at this moment."""
    _clear(folder)
    (folder / LOCK).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _clear(folder: Path) -> None:
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name != LOCK:
            item.unlink()


@contextlib.contextmanager
def _tokenizer_threads(enabled: bool) -> Iterator[None]:
    """Turn the tokenizer's threads on or off: a single process uses several cores through them."""
    before = {name: value for name, value in os.environ.items() if name == THREADS}
    os.environ[THREADS] = "true" if enabled else "false"
    try:
        yield
    finally:
        del os.environ[THREADS]
        os.environ |= before


def _run_worker(folder: Path, answers: TextIO) -> None:
    """The worker process: pack the shards whose indices are read from stdin, until the parent process ends."""
    indices: queue.SimpleQueue[int] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            indices.put(int(line))
        os._exit(0)  # also in the middle of a shard, which nobody waits for any more

    threading.Thread(target=listen, daemon=True).start()
    job = Job.load(folder)
    packer = job.packer()
    while True:
        try:
            answer: dict[str, Any] = asdict(job.pack(indices.get(), packer))
        except BraidError as error:
            answer = {"error": [error.what, error.where, error.todo]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # Libraries may print, so answers have a file descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _run_worker(Path(sys.argv[1]), answers)
