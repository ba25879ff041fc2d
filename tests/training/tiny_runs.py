"""Recipes of runs that take a second, and what to compare of two of them."""

import copy
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

from braidlm.training.loop import Trainer
from braidlm.training.train import train

BASE: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "model": {
        "width": 16,
        "context": 32,
        "positions": "rope",
        "block": {"attention": {"heads": 2}, "feed": {"kind": "swiglu", "hidden": 24}},
        "stages": ["block"],
    },
    "data": {"length": 32},
    "training": {"budget": "12 steps", "batch": 4, "warmup": "2 steps", "optimizer": {"lr": 1e-2}},
    "checkpoints": {"every": "4 steps"},
    "validation": {"every": "6 steps", "tokens": 500},
    "log": {"every": 5},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`; mappings are merged, anything else replaces."""
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def tiny_recipe(packed: Mapping[str, Path], out: Path, **changes: Any) -> dict[str, Any]:
    """A recipe over packed data sets, with top-level sections merged into the base."""
    sets = {name: {"path": str(folder), "holdout": 0.05} for name, folder in packed.items()}
    return merged(merged(BASE, {"out": str(out), "data": {"sets": sets}}), changes)


def decoder_recipe(packed: Path, out: Path, decoder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe that trains a decoder on packed data."""
    sets = {"stories": {"path": str(packed), "holdout": 0.05}}
    base = {key: value for key, value in BASE.items() if key != "model"}
    return merged(merged(base, {"out": str(out), "decoder": str(decoder), "data": {"sets": sets}}), changes)


def written(recipe: Mapping[str, Any], folder: Path, name: str = "recipe-file") -> Path:
    """A recipe as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
    return path


def weights(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


def weight_bytes(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


def records(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records without what depends on the clock and the machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timeless = [
        {k: v for k, v in line.items() if k not in ("tokens_per_second", "seconds", "memory")} for line in lines
    ]
    return [line for line in timeless if kind is None or line["kind"] == kind]


def stopped_after(steps: int, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any]) -> None:
    """Train until a signal arrives in step `steps`."""
    step = Trainer._step

    def stop_requested(self: Trainer) -> None:
        step(self)
        if self.progress.steps == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stop_requested)
        run = train(recipe)
    assert (run.finished, run.progress.steps) == (False, steps)
