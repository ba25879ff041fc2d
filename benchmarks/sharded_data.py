"""Reading a data set in shards over S3's protocol: tokens per second beside the same shards in a folder, and memory.

    python benchmarks/sharded_data.py --gigabytes 20 [--stride 2048]

The server is the stand-in of the tests, in a process of its own. Its shards are one shard of made-up stories, each with
another end, so that all hashes differ and nobody needs the disk: it can serve any amount. The loader reads
in segments: one over S3 with a cache of 2 GB, then a quarter as many tokens from a folder of the first shards, in turn,
so that a slow minute of the machine hits both; what a segment has asked for ahead is waited for within it. Within
a segment the loader is killed (SIGKILL), and another process goes on from the position saved last: what both
read is compared by hashes. Memory is that of the loader's process: its own (anonymous), and all with mapped files.
With a stride above 256 every shard comes, and only some of its chunks are read: less work for a busy machine.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import record

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.data.s3_server import ENVIRONMENT, Store

from braidlm.core.files import json_sha256
from braidlm.data.loading.chunking import Contiguous, Windows
from braidlm.data.loading.loader import Loader
from braidlm.data.loading.sharded_streams import TOGETHER, stream_of
from braidlm.data.packing.packed_data import PackedData, ShardFacts
from braidlm.data.packing.prepare import prepare
from braidlm.data.packing.sharded import ShardedData, open_packed

SHARD_TOKENS, SEGMENTS, MARK = 16_000_000, 10, 16
"""Tokens of a shard; segments of the reading; bytes at the end of tokens.bin in which shards differ."""
LENGTH, ROWS, SAVED_EVERY = 256, 64, 200
LOCAL = 4
"""The part of a segment's tokens that is read from the folder; its seconds are multiplied by this."""


def mark(index: int) -> bytes:
    """The last tokens of a shard: its number in digits."""
    return np.array([int(digit) for digit in f"{index:0{MARK // 2}d}"], np.uint16).tobytes()


class Repeated(Store):
    """Shards that differ in their ends alone."""

    def __init__(self, base: Path, index: bytes):
        super().__init__()
        self.files = {path.name: path.read_bytes() for path in base.glob("*.bin")}
        self.objects["packed/data.json"] = index

    def size(self, key: str) -> int | None:
        return super().size(key) if key in self.objects else len(self.files.get(key.rpartition("/")[2], b"")) or None

    def read(self, key: str, start: int, stop: int) -> bytes:
        _, folder, name = ("/" + key).rsplit("/", 2)
        if key in self.objects:
            return super().read(key, start, stop)
        data = self.files[name]
        if name != "tokens.bin" or stop <= len(data) - MARK:
            return data[start:stop]
        return (data[:-MARK] + mark(int(folder)))[start:stop]


def make_shard(folder: Path) -> PackedData:
    """A packed folder of made-up stories, again and again, of the tokens of a shard."""
    stories = prepare("stories", folder / "stories", documents=4000, vocab_size=4096, workers=1)
    times = SHARD_TOKENS // stories.manifest.tokens
    base = folder / "base"
    base.mkdir()
    starts, tokens = np.asarray(stories.document_starts), stories.manifest.tokens
    all_starts = [starts[:-1] + turn * tokens for turn in range(times)] + [np.array([times * tokens])]
    np.concatenate(all_starts).astype(np.int64).tofile(base / "documents.bin")
    for name in ("tokens.bin", "words.bin", "lengths.bin"):
        (base / name).write_bytes((stories.folder / name).read_bytes() * times)
    facts = stories.manifest
    counts = {name: times * getattr(facts, name) for name in ("tokens", "documents", "words", "bytes")}
    return PackedData(base, replace(facts, **counts))


def index_of(base: PackedData, count: int) -> dict[str, Any]:
    """data.json of a set of so many shards; the hash of a file with another end needs only that end."""
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(base.folder.iterdir())}
    begun = hashlib.sha256((base.folder / "tokens.bin").read_bytes()[:-MARK])
    facts, shards = base.manifest, []
    for index in range(count):
        whole = begun.copy()
        whole.update(mark(index))
        digest = json_sha256(hashes | {"tokens.bin": whole.hexdigest()})
        shards.append(ShardFacts(f"{index:06d}", facts.tokens, facts.documents, facts.words, facts.bytes, digest))
    counts = {name: count * getattr(facts, name) for name in ("tokens", "documents", "words", "bytes")}
    return asdict(replace(facts, **counts, shards=shards, name="packed"))


def memory_mb() -> dict[str, float]:
    """This process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines if line.startswith("Rss")}
    return {"own_mb": values["RssAnon"], "with_files_mb": sum(values.values())}


def open_loader(place: str, cache: Path, stride: int) -> Loader:
    chunking = Contiguous() if stride == LENGTH else Windows(Windows.Config(stride=stride))
    return Loader([stream_of(open_packed(place, cache, 2.0), name="packed")], chunking, LENGTH, ROWS, seed=1)


def read(loader: Loader, tokens: int, log: Any = None, state: Path | None = None) -> float:
    """Seconds that the next so many tokens take; what is on its way is waited for."""
    started, done = time.perf_counter(), 0
    while done < tokens:
        batch = loader.next_batch()
        done += batch.token_count
        if log is not None:
            row = hashlib.sha256(batch.inputs[:: ROWS // 4].tobytes()).hexdigest()[:16]
            places = loader.state()["places"]["packed"]
            log.write(f"{places} {row}\n")
            log.flush()
            if state is not None and places[1] // ROWS % SAVED_EVERY == 0:
                state.with_suffix(".new").write_text(json.dumps(loader.state()))
                os.replace(state.with_suffix(".new"), state)
    for stream in loader.streams:
        assert isinstance(stream.data, ShardedData)
        for future in stream.data._opened.values():
            future.result()
    return time.perf_counter() - started


def reader(args: argparse.Namespace) -> None:
    """The loader's process: all segments, from the saved position if there is one."""
    scratch, done = args.scratch, 0
    remote = open_loader("s3://packed", scratch / "cache", args.stride)
    local = open_loader(str(scratch / "local"), scratch, args.stride)
    state, results = scratch / "state.json", scratch / "segments.jsonl"
    if state.exists():
        remote.load_state(json.loads(state.read_text()))
        done = len(results.read_text().splitlines())
    total = remote.streams[0].data.manifest.tokens * LENGTH // args.stride
    with open(scratch / f"log-{os.getpid()}", "w") as log, open(os.devnull, "w") as nowhere:
        for segment in range(done, SEGMENTS):
            tokens = total // SEGMENTS
            s3, there = read(remote, tokens, log, state), LOCAL * read(local, tokens // LOCAL, nowhere)
            facts = {"segment": segment, "tokens": tokens, "s3": s3, "local": there, **memory_mb()}
            with open(results, "a") as file:
                file.write(json.dumps(facts) + "\n")
            print(facts, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--stride", type=int, default=LENGTH, help="tokens from one chunk of 256 to the next")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.scratch is not None:
        return reader(args)
    args.scratch = Path(tempfile.mkdtemp())
    try:
        base = make_shard(args.scratch)
        size = sum(path.stat().st_size for path in base.folder.iterdir())
        count = round(args.gigabytes * 1e9 / size)
        index = index_of(base, count)
        local = index_of(base, max(count // SEGMENTS, TOGETHER))  # a batch is of as many shards on both sides
        for shard in local["shards"]:
            shutil.copytree(base.folder, args.scratch / "local" / shard["name"])
        (args.scratch / "local/data.json").write_text(json.dumps(local))
        serving = subprocess.Popen([sys.executable, "-c", SERVE, str(base.folder)], stdin=subprocess.PIPE, stdout=-1)
        assert serving.stdin is not None
        assert serving.stdout is not None
        serving.stdin.write(json.dumps(index).encode() + b"\n")
        serving.stdin.flush()
        environment = os.environ | ENVIRONMENT | {"AWS_ENDPOINT_URL": serving.stdout.readline().decode().strip()}
        command = [sys.executable, __file__, "--scratch", str(args.scratch), "--stride", str(args.stride)]
        results, kills = args.scratch / "segments.jsonl", 0
        while not results.exists() or len(results.read_text().splitlines()) < SEGMENTS:
            reading = subprocess.Popen(command, env=environment)
            while reading.poll() is None:
                time.sleep(0.5)
                segments = len(results.read_text().splitlines()) if results.exists() else 0
                logs = list(args.scratch.glob(f"log-{reading.pid}"))
                is_begun = logs and logs[0].stat().st_size > args.gigabytes * LENGTH / args.stride * 50_000
                if kills < 2 and segments >= 1 + 3 * kills and is_begun:
                    reading.kill()
                    kills += 1
            if reading.returncode not in (0, -9):
                raise SystemExit(f"the reader ended with {reading.returncode}")
        serving.kill()
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        tokens, s3, there = (sum(row[name] for row in rows) for name in ("tokens", "s3", "local"))
        summary = {
            "gigabytes": size * count / 1e9,
            "stride": args.stride,
            "shards": count,
            "kills": kills,
            "batches_read_twice": same_batches(args.scratch),
            "s3_tokens_per_second": tokens / s3,
            "local_tokens_per_second": tokens / there,
            "s3_share_of_local": there / s3,
        }
        record("sharded_data", torch.device("cpu"), [summary, *rows], args.out)
    finally:
        shutil.rmtree(args.scratch)


def same_batches(scratch: Path) -> int:
    """How many batches were read by two processes; an error if one differs."""
    seen: dict[str, str] = {}
    twice = 0
    for path in scratch.glob("log-*"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a killed process may be cut
                place, row = line.rsplit(" ", 1)
                if len(row) == 16:
                    twice += place in seen
                    assert seen.setdefault(place, row) == row, f"another batch at {place}"
    return twice


SERVE = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from pathlib import Path
from sharded_data import Repeated
from tests.data.s3_server import s3_server
with s3_server(Repeated(Path(sys.argv[1]), sys.stdin.buffer.readline().strip())) as environment:
    print(environment["AWS_ENDPOINT_URL"], flush=True)
    sys.stdin.read()
"""

if __name__ == "__main__":
    main()
