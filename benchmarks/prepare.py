"""`braid prepare` on a corpus of text files: megabytes per second and peak memory, once the tokenizer is trained.

    python benchmarks/prepare.py FOLDER_OR_FILES...

The peer is one core of the same tokenizer library calling encode_batch on the same text and doing nothing else.
"""

import argparse
import os
import resource
import shutil
import tempfile
import time
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
                "peak_mb_main": _peak_mb(resource.RUSAGE_SELF),
                "peak_mb_largest_worker": _peak_mb(resource.RUSAGE_CHILDREN),
            }
        ]
        peer = _encode_only(first.tokenizer_folder / "tokenizer.json", args.sources)
        rows.append(dict.fromkeys(rows[0], "") | {"what": "encode_batch alone, one core", "mb_per_second": peer})
        record("prepare", torch.device("cpu"), rows, args.out)
    finally:
        shutil.rmtree(scratch)


def _peak_mb(process: int) -> float:
    return resource.getrusage(process).ru_maxrss / 1024


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
