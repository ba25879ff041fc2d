"""Kill one of four processes at random moments, go on with four, two or one, and compare with an undisturbed run.

    PYTHONPATH=src:. python benchmarks/kill_processes.py [--kills 20] [--seed 1]

Weights, gradients and optimizer state are sharded over the processes, which share the experts too (gloo, on the CPU).
One process gets SIGKILL; the others must end within a minute, with a sentence. After every fourth kill the run goes on
to its end by four, two or one process in turn, and its losses and weights are compared.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from benchmarks.kill_everything import MODULES
from safetensors.torch import load_file
from tests.training.forked_runs import fork

from braidlm.core.models.runs import HISTORY, read_metrics, read_records
from braidlm.data.packing.prepare import prepare

PROCESSES, KILLS_OF_ONE_RUN, SENTENCE = 4, 4, "another process of this run has ended or does not answer"
EVERY = {"checkpoints": {"every": "3 steps", "keep": 2}, "validation": {"every": "20 steps", "tokens": 500}}
TRAINING: dict[str, Any] = {
    "budget": "60 steps",
    "batch": 2,
    "warmup": "5 steps",
    "optimizer": {"kind": "muon"},
    "average": {"kind": "ema", "rate": 0.9},
    "parallel": {"weights": "sharded", "experts": 2},
}


def recipe(work: Path, name: str) -> Path:
    sets = {"stories": {"path": str(work / "packed"), "holdout": 0.05}}
    data = {"length": 32, "sets": sets}
    whole = {"model": MODULES, "data": data, "training": TRAINING, **EVERY, "log": {"every": 1}}
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**whole, "out": str(work / name)}))
    return path


def command(path: Path, processes: int) -> list[str]:
    alone = ["training.parallel=auto"] if processes == 1 else []
    return ["train", str(path), "--device", "cpu", *alone]


def recorded(run: Path) -> int:
    """The steps that a run has recorded."""
    return len(read_metrics(run, "train"))


def started(run: Path) -> int:
    """How often a run was begun or gone on with."""
    return len(read_records(run / HISTORY))


def differences(work: Path, name: str) -> tuple[float, float]:
    """The largest differences from the undisturbed run, of losses and of weights."""
    runs = [read_metrics(work / each, "train") for each in ("whole", name)]
    assert [record["step"] for record in runs[0]] == [record["step"] for record in runs[1]], "a record is lost"
    losses = max(abs(a["loss"] - b["loss"]) for a, b in zip(*runs, strict=True))
    a, b = (load_file(work / each / "checkpoints" / "step-000060" / "model.safetensors") for each in ("whole", name))
    return losses, max(float((a[key] - b[key]).abs().max()) for key in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    work, rng = Path(tempfile.mkdtemp()), random.Random(args.seed)
    prepare("stories", work / "packed", documents=100, vocab_size=300, workers=1)
    begin = time.monotonic()
    fork(work / "whole.log", *command(recipe(work, "whole"), PROCESSES), processes=PROCESSES).finish()
    seconds, killed, slowest, number = time.monotonic() - begin, 0, 0.0, 0
    print(f"undisturbed: {seconds:.0f} s", flush=True)
    while killed < args.kills:
        number += 1
        name, path = f"killed-{number}", recipe(work, f"killed-{number}")
        for _ in range(min(KILLS_OF_ONE_RUN, args.kills - killed)):
            run = fork(work / f"{name}.log", *command(path, PROCESSES), processes=PROCESSES)
            # Before they have found each other it is for the launcher to end all, as torchrun does.
            starts, steps = started(work / name), recorded(work / name) + rng.randrange(12)
            while started(work / name) == starts or recorded(work / name) < steps:
                assert run.is_alive(), run.screen.read_text()
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.5))
            index = rng.randrange(PROCESSES)
            run.processes[index].kill()
            since = time.monotonic()
            printed = run.wait()
            slowest, killed = max(slowest, time.monotonic() - since), killed + 1
            codes = [code for place, code in enumerate(run.exit_codes) if place != index]
            assert SENTENCE in printed, printed
            assert codes == [2] * 3, (codes, printed)
            print(f"{name}: process {index} killed, the others ended in {time.monotonic() - since:.1f} s", flush=True)
        processes = (4, 2, 1)[number % 3]
        fork(work / f"{name}.log", *command(path, processes), processes=processes).finish()
        losses, weights = differences(work, name)
        print(f"{name}: ended by {processes}; losses differ by {losses:.1e}, weights by {weights:.1e}", flush=True)
    print(f"{killed} kills of one of {PROCESSES} processes; the others ended within {slowest:.0f} s")


if __name__ == "__main__":
    main()
