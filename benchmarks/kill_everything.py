"""Kill commands at random moments, run them again to the end, and compare with commands that were never killed.

    python benchmarks/kill_everything.py [--kills 20] [--seed 1] [--out DIR] [COMMAND ...]

A command is started in a folder of its own, its whole process group is killed (SIGKILL) at a random moment between
the first file that it writes and its end, up to four times in one folder, so that what resumes is killed again. Then it
runs to its end, and every file is compared with those of the undisturbed command: byte for byte, but for times.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

KILLS_IN_ONE_FOLDER = 4
TINY: dict[str, Any] = {
    "width": 16,
    "context": 64,
    "positions": "rope",
    "block": {"attention": {"heads": 2}, "feed": {"kind": "swiglu", "hidden": 24}},
    "stages": ["block"],
}
EXPERTS: dict[str, Any] = {"names": 4, "router": {"top_k": 2, "compute": "dense"}}
"""Not the faster one here and now, which may differ from run to run and so round differently."""
MODULES: dict[str, Any] = {
    **TINY,
    "block": {
        "attention": {"kind": "stick_breaking", "heads": 2, "experts": EXPERTS},
        "feed": {"kind": "mlp", "hidden": 24, "experts": EXPERTS},
    },
}
RUN: dict[str, Any] = {
    "model": {**TINY, "dropout": 0.1},
    "data": {"length": 32},
    "training": {"budget": "100 steps", "batch": 4, "warmup": "5 steps"},
    "checkpoints": {"every": "10 steps", "keep": None},
    "validation": {"every": "25 steps", "tokens": 500},
    "log": {"every": 5},
}
STUDY: dict[str, Any] = {
    "name": "study",
    "seeds": [1],
    "epochs": 1,
    "domains": {
        "stories": {"source": "stories", "documents": 30, "holdout": 0.1},
        "maths": {"source": "maths", "documents": 60, "holdout": 0.1},
    },
    "data": {"length": 32, "tokenizer": {"kind": "bpe", "vocab_size": 300}},
    "paths": {"share": 0.5, "model": TINY},
    "composed": {"composed": {"join": {"kind": "gumbel_v1", "sample": "softmax"}}},
    "whole": {"dense": TINY},
    "training": {"batch": 8},
    "checkpoints": {"every": "10 steps"},
    "validation": {"every": "50 steps", "tokens": 500},
    "log": {"every": 10},
}
VARIANTS: dict[str, Any] = {
    **{key: value for key, value in STUDY.items() if key not in ("paths", "composed")},
    "name": "variants",
    "whole": {"base": {"model": MODULES, "domains": ["stories"]}},
    "variants": {
        "inserted": {
            "start": "base",
            "edits": [{"insert": {"modules": 2}}],
            "domains": ["maths"],
            "budget": "30 steps",
        },
        "joint": {"start": "base", "domains": {"maths": 4, "stories": 1}, "budget": "30 steps"},
        "pruned": {"start": "joint", "edits": [{"prune": {"text": "maths", "keep": 0.9, "tokens": 2000}}]},
    },
}
TEXT = (".json", ".jsonl", ".yaml", ".html", ".md", ".svg", ".csv", ".txt", ".tex")
TIMES = re.compile(
    rb'"(saved|created|seconds|wall_seconds|tokens_per_second)": [^,}\n]+'
    rb"|\d{4}-\d\d-\d\d[T ][\d:+.]+|\b[\d,.]+ ?(ms|s|min)\b"
)
"""What differs between two runs of one command."""
TIMED = ("manifest.json", "report.html", "cost.csv", "cost.md", "training-time.csv", "training-time.md")
"""Files made of times, or of hashes of files with times in them."""


def commands(shared: Path) -> dict[str, list[str]]:
    """Each command that is killed; it works in the folder of its round and writes `out`."""
    a, b, modules, text = (str(shared / name) for name in ("a", "b", "modules", "text.txt"))
    cpu = ["--device", "cpu"]
    return {
        "prepare": ["prepare", text, "--out", "out", "--vocab-size", "400", "--workers", "2"],
        "train": ["train", str(shared / "run.yaml"), "out=out", *cpu],
        "study": ["train", str(shared / "study.yaml"), "out=out", "data.cache=cache", *cpu],
        "variants": ["train", str(shared / "variants.yaml"), "out=out", "data.cache=cache", *cpu],
        "compose": ["compose", a, b, "--out", "out"],
        "prune": ["edit", "prune", modules, "--text", text, "--tokens", "5000", "--keep", "0.9", "--out", "out"],
        "insert": ["edit", "insert", modules, "--modules", "2", "--out", "out"],
        "convert": ["convert", str(shared / "a"), "--to", "llama", "--out", "out"],
        "eval": ["eval", a, b, "bits_per_byte", "--data", f"bits_per_byte={text}", "--out", "out", *cpu],
    }


def make_shared(shared: Path) -> None:
    """The text, the models and the recipes that the commands read."""
    from braidlm.data.corpora.builtin import documents
    from braidlm.data.packing.prepare import prepare
    from braidlm.training.train import train

    shared.mkdir(parents=True)
    (shared / "text.txt").write_text("\n\n".join(documents("stories", 0, count=2000)), encoding="utf-8")
    prepare("stories", shared / "packed", documents=100, vocab_size=300, workers=1)
    data = {"length": 32, "sets": {"stories": {"path": str(shared / "packed"), "holdout": 0.05}}}
    for number, (name, model) in enumerate({"a": TINY, "b": TINY, "modules": MODULES}.items()):
        recipe = {**RUN, "model": model, "data": data, "seed": number, "out": str(shared / name)}
        train({**recipe, "training": {"budget": "10 steps", "batch": 4}}, device="cpu")
    (shared / "run.yaml").write_text(yaml.safe_dump({**RUN, "data": data}))
    for study in (STUDY, VARIANTS):
        (shared / f"{study['name']}.yaml").write_text(yaml.safe_dump(study))


def start(words: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with open(folder.parent / f"{folder.name}.log", "ab") as log:
        command = [sys.executable, "-P", "-m", "braidlm", *words]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)


def finish(words: list[str], folder: Path) -> tuple[float, float]:
    """Run to the end; returns the seconds to the first file and to the end."""
    begin, first = time.monotonic(), None
    process = start(words, folder)
    while process.poll() is None:
        if first is None and any(folder.iterdir()):
            first = time.monotonic() - begin
        time.sleep(0.005)
    if process.returncode:
        log = (folder.parent / f"{folder.name}.log").read_text(errors="replace")
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}\n{log[-2000:]}")
    seconds = time.monotonic() - begin
    return first or seconds, seconds


def kill(words: list[str], folder: Path, delay: float) -> bool:
    """Start a command and kill it after `delay` seconds; False if it had ended before."""
    process = start(words, folder)
    time.sleep(delay)
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return alive


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, without times and the folder's own name."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in TIMED:
            data = path.read_bytes()
            if path.suffix in TEXT:
                data = TIMES.sub(b"", data.replace(str(folder).encode(), b"FOLDER"))
            files[str(path.relative_to(folder))] = data
    return files


def differences(expected: dict[str, bytes], folder: Path) -> list[str]:
    """The files of a folder that are not as expected."""
    found = contents(folder)
    return [f"{folder}/{name}" for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]


def kill_again_and_again(words: list[str], folder: Path, kills: int, rng: random.Random) -> tuple[int, int, list[str]]:
    """Returns how often the command was killed, how often there were files of it then, and what differs at the end."""
    whole = folder / "whole"
    whole.mkdir(parents=True)
    first, seconds = finish(words, whole)
    expected = contents(whole)
    killed, inside, different, number = 0, 0, [], 0
    while killed < kills:
        scene = folder / f"killed-{number}"
        scene.mkdir()
        number += 1
        for _ in range(min(KILLS_IN_ONE_FOLDER, kills - killed)):
            if not kill(words, scene, rng.uniform(0.9 * first, seconds)):
                first, seconds = 0.9 * first, 0.9 * seconds  # the machine has become faster
                break
            killed += 1
            inside += any(scene.iterdir())
        if not (scene / "out").is_dir() or words[0] in ("train", "eval"):  # the others refuse a folder that is whole
            finish(words, scene)
        found = differences(expected, scene)
        different += found
        if not found:
            shutil.rmtree(scene)
    return killed, inside, different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to work; it must not exist (default: a temporary folder)")
    args = parser.parse_args()
    work = (args.out or Path(tempfile.mkdtemp()) / "work").resolve()
    make_shared(work / "shared")
    everything = commands(work / "shared")
    rng = random.Random(args.seed)
    failed = False
    for name in args.commands or everything:
        killed, inside, different = kill_again_and_again(everything[name], work / name, args.kills, rng)
        print(
            f"{name}: {killed} kills, {inside} of them among files; {len(different)} files differ",
            *different,
            sep="\n  ",
        )
        sys.stdout.flush()
        failed |= bool(different)
    if failed:
        raise SystemExit(f"what differs is in {work}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
