"""Timing and recording shared by the benchmarks: the best of interleaved rounds, results with hardware and date."""

import json
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def compared_seconds(
    works: dict[str, Callable[[], Any]], calls: int, warmup: int, device: torch.device, rounds: int = 5
) -> dict[str, float]:
    """Seconds per call when calls follow each other as in a training loop: the best of several rounds.

    The contestants take turns in every round, so that a slow minute of the machine hits all of them.
    """
    for work in works.values():
        for _ in range(warmup):
            work()
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            _wait(device)
            begun = time.perf_counter()
            for _ in range(calls):
                work()
            _wait(device)
            best[name] = min(best[name], (time.perf_counter() - begun) / calls)
    return best


def interleaved_clocks(
    works: dict[str, Callable[[], Any]], calls: int, warmup: int, device: torch.device, rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Of every round the seconds per call, and the CPU seconds that this thread took to launch it.

    In every round the contestants come in another order, so that none is always the one after another.
    """
    for work in works.values():
        for _ in range(warmup):
            work()
    clocks: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in works}
    order = list(works)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            _wait(device)
            begun, begun_host = time.perf_counter(), time.thread_time()
            for _ in range(calls):
                works[name]()
            host = time.thread_time() - begun_host
            _wait(device)
            clocks[name][0].append((time.perf_counter() - begun) / calls)
            clocks[name][1].append(host / calls)
    return clocks


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def hardware(device: torch.device) -> str:
    """A name for the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return f"{platform.machine()} CPU"


def record(name: str, device: torch.device, rows: list[dict[str, Any]], out: Path | None = None) -> Path:
    """Write rows as a dated result, or as the .json file `out`, and print them as a table."""
    facts = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": shlex.join(["python", *sys.argv]),
        "rows": rows,
    }
    kind = "gpu" if device.type == "cuda" else "cpu"
    dated = f"{facts['date']}-{name}-{kind}.json"
    path = out if out is not None and out.suffix == ".json" else (out or RESULTS) / dated
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"\n{name} on {facts['hardware']}, torch {facts['torch']}, {facts['date']}")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        values = (row.get(column, "") for column in columns)
        print("| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values) + " |")
    return path
