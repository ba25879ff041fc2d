"""`braid prepare` on a corpus of text files: megabytes per second once the tokenizer is trained, and peak memory.

    python benchmarks/prepare.py FOLDER_OR_FILES...

The peak is that of all processes together, sampled every 0.1 s, in training the tokenizer and packing.

The peer is one core of the same tokenizer library calling encode_batch on the same text and doing nothing else.
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from measure import record
from tokenizers import Tokenizer

from braidlm.data.packing.prepare import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    try:
        with _peak_memory() as peak:
            started = time.perf_counter()
            first = prepare(args.sources, scratch / "first", vocab_size=args.vocab_size)
            with_training = time.perf_counter() - started
            started = time.perf_counter()
            prepare(args.sources, scratch / "second", tokenizer=first.tokenizer_folder)
            packing = time.perf_counter() - started
        megabytes = first.manifest.bytes / 1e6
        rows = [
            {
                "what": "braid prepare",
                "megabytes": megabytes,
                "seconds": packing,
                "mb_per_second": megabytes / packing,
                "seconds_with_tokenizer_training": with_training,
                "peak_mb": max(peak),
            }
        ]
        peer = _encode_only(first.tokenizer_folder / "tokenizer.json", args.sources)
        rows.append(dict.fromkeys(rows[0], "") | {"what": "encode_batch alone, one core", "mb_per_second": peer})
        record("prepare", torch.device("cpu"), rows, args.out)
    finally:
        shutil.rmtree(scratch)


@contextmanager
def _peak_memory() -> Iterator[list[float]]:
    """Megabytes of this process and those that it started, sampled while the block runs."""
    samples, done = [0.0], threading.Event()

    def sample() -> None:
        while not done.wait(0.1):
            samples.append(sum(map(_resident_mb, _with_children(os.getpid()))))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield samples
    done.set()
    thread.join()


def _with_children(process: int) -> list[int]:
    processes = [process]
    for parent in processes:
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            processes += map(int, file.read_text().split())
    return processes


def _resident_mb(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except FileNotFoundError:  # it has ended
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def _encode_only(tokenizer_file: Path, sources: list[str]) -> float:
    """Megabytes per second of the tokenizer library alone on the beginning of every file."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    files = [f for s in sources for f in ([Path(s)] if Path(s).is_file() else sorted(Path(s).rglob("*.txt")))]
    texts, size = [], 0
    for file in files:
        for text in file.read_text(encoding="utf-8")[:500_000].split("\n\n"):
            texts.append(text)
            size += len(text.encode())
    started = time.perf_counter()
    for start in range(0, len(texts), 256):
        tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False)
    return size / 1e6 / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
