"""Processes that pack shards.

Each is a fresh `python -m braidlm.data.packing.workers FOLDER` that reads shard indices and answers each with a line of
JSON, so that packing works from scripts, notebooks, tests and `python -c` alike.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from braidlm.core.errors import BraidError
from braidlm.core.files import read_json, write_json
from braidlm.data.packing.shards import Packer, ShardFacts, pack_shard
from braidlm.data.sources import Reading, Shard, documents
from braidlm.data.tokenizing.build import load_tokenizer

JOB = "job.json"


@dataclass
class Job:
    """What a worker needs to know: the pieces, how to read them, and the folder with the tokenizer and results."""

    folder: Path
    reading: Reading
    shards: list[Shard]

    def save(self) -> None:
        shards = [list(asdict(shard).values()) for shard in self.shards]
        write_json(self.folder / JOB, {"reading": asdict(self.reading), "shards": shards})

    @classmethod
    def load(cls, folder: Path) -> "Job":
        facts = read_json(folder / JOB)
        reading = Reading(**{**facts["reading"], "fields": tuple(facts["reading"]["fields"])})
        return cls(folder, reading, [Shard(*values) for values in facts["shards"]])

    @property
    def results(self) -> Path:
        return self.folder / "shards"

    def pack(self, index: int, packer: Packer) -> ShardFacts:
        return pack_shard(documents(self.shards[index], self.reading), packer, self.results, index)


def pack_all(job: Job, indices: Sequence[int], workers: int) -> Iterator[tuple[int, ShardFacts]]:
    """Pack shards, yielding each as it is finished. Closing the iterator stops the work."""
    if min(workers, len(indices)) <= 1:
        packer = Packer(load_tokenizer(job.folder / "tokenizer"))
        with _tokenizer_threads(workers > 1):
            for index in indices:
                yield index, job.pack(index, packer)
    else:
        yield from _in_processes(job, indices, min(workers, len(indices)))


def _in_processes(job: Job, indices: Sequence[int], workers: int) -> Iterator[tuple[int, ShardFacts]]:
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    for index in indices:
        waiting.put(index)
    processes = [_start(job.folder) for _ in range(workers)]
    threads = [threading.Thread(target=_feed, args=(p, waiting, answers), daemon=True) for p in processes]
    try:
        for thread in threads:
            thread.start()
        for _ in indices:
            index, answer = answers.get()
            if "error" in answer:
                raise BraidError(*answer["error"])
            yield index, ShardFacts(**answer)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join()
        for process in processes:
            with contextlib.suppress(OSError), process:
                pass  # closes the pipes


def _start(folder: Path) -> "subprocess.Popen[str]":
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread each: the processes fill the cores.
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "braidlm.data.packing.workers", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _feed(
    process: "subprocess.Popen[str]",
    waiting: "queue.SimpleQueue[int]",
    answers: "queue.SimpleQueue[tuple[int, dict[str, Any]]]",
) -> None:
    """Give one process shard after shard until none is left."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(queue.Empty):
        while True:
            index = waiting.get_nowait()
            try:
                process.stdin.write(f"{index}\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except (OSError, ValueError):
                answer = ""
            answers.put((index, json.loads(answer) if answer.endswith("\n") else _died(process)))


def _died(process: "subprocess.Popen[str]") -> dict[str, Any]:
    code = process.wait()
    reason = "it was killed; is there enough memory?" if code < 0 else f"exit code {code}"
    todo = "Finished pieces are kept: run the same command again to go on, with fewer `--workers` if memory is short."
    return {"error": ["a packing process ended unexpectedly", reason, todo]}


@contextlib.contextmanager
def _tokenizer_threads(on: bool) -> Iterator[None]:
    """One process uses the cores through the tokenizer's threads, if it may use several."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if on else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _work(folder: Path, answers: TextIO) -> None:
    """A worker's life: a number in, a line out, and gone when the one who asked is gone."""
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            numbers.put(int(line))
        os._exit(0)  # also in the middle of a shard: nobody waits for it any more

    threading.Thread(target=listen, daemon=True).start()
    job = Job.load(folder)
    packer = Packer(load_tokenizer(folder / "tokenizer"))
    while True:
        try:
            answer: dict[str, Any] = asdict(job.pack(numbers.get(), packer))
        except BraidError as error:
            answer = {"error": [error.what, error.where, error.todo]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the one who asked, who ends us
    # Libraries may print; only answers go to the one who asked.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _work(Path(sys.argv[1]), answers)
