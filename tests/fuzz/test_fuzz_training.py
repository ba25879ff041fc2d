"""Recipes with training features in any combination: a run that goes on and whose model works, or an error in words."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, note

from braidlm.core.models.folders import save_model
from braidlm.data.loading.config import DataConfig
from braidlm.data.tokenizing.build import load_tokenizer
from braidlm.inspection.generate import generate
from braidlm.studies.show import show
from braidlm.training.loop import Trainer
from braidlm.training.recipe import CheckpointConfig, LogConfig, SampleConfig, TrainingConfig, ValidationConfig
from braidlm.training.train import train
from tests.edits.small_models import BANKS
from tests.fuzz.choices import CASES, architecture_of, options_of
from tests.fuzz.honesty import honest
from tests.fuzz.mutations import seeded
from tests.tiny_decoders import save_decoder
from tests.tiny_models import BASE, tiny_model
from tests.training.tiny_runs import weight_bytes

SECTIONS = {"checkpoints": CheckpointConfig, "validation": ValidationConfig, "samples": SampleConfig, "log": LogConfig}
KNOWN: dict[str, list[Any]] = {
    "budget": ["2 steps", "3 steps", "1 steps"],
    "batch": [2, 1, 3],
    "compile": [None, False],
    "warmup": ["1 steps", "0 steps"],
    "parallel": ["auto", "replicated", "sharded"],
    "threads": [None, 1],
    "tokens": [20, 64, None],
    "length": [16, 32, 8, 5],
    "sets": [None],
    "cache": ["cache"],
    "track": [[]],
    "LogConfig.every": [1, 2],
    "SampleConfig.tokens": [1, 2],
    "ValidationConfig.tokens": [20, 64],
    "half": [None],
    "every": ["1 steps", "2 steps", "1 steps to 2, then 2", "40 tokens", 1, None],
    "prompts": [["Once"], [""], []],
    "targets": [None, ["qkv"], "all", ".*out"],
    "weights": [{"stories": 1}, {"maths": 1, "stories": 3}, {"nothing": 1}],
    "text": ["stories", "a"],
}
"""What options of these names often are; others go by their types."""


@pytest.fixture(scope="module")
def trained(sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models to start from, or to learn from: dense, of experts with gates, and a decoder of transformers."""
    tokenizer, home = load_tokenizer(sets["stories"]), tmp_path_factory.mktemp("trained")
    for name, changes in {"dense": {}, "gated": BANKS | {"gates": {"kind": "vector"}}}.items():
        save_model(
            tiny_model(vocab_size=tokenizer.vocab_size, **changes), home / name, tokenizer, {"made_by": "a test"}
        )
    save_decoder("llama", Path(sets["stories"]), home / "decoder")
    return {name: str(home / name) for name in ("dense", "gated", "decoder")}


@seeded(8)
@given(CASES)
def test_features_together(
    sets: dict[str, str], trained: dict[str, str], tmp_path_factory: pytest.TempPathFactory, rng: Random
) -> None:
    """What a finished run has made can be shown and generates, the run goes on with a larger budget, and one that was
    stopped and goes on ends with the same weights."""
    home = tmp_path_factory.mktemp("runs")
    recipe = recipe_of(rng, sets, trained, home / "run")
    note(f"recipe {recipe}")
    with honest():
        made = train(recipe, device="cpu").model
        show(made)
        generate(made, ["Once"], max_tokens=2, temperature=0.0, device="cpu")
        if rng.random() < 0.4:
            other = recipe | {"out": str(home / "stopped")}
            with stopping_after(1):
                train(other, device="cpu")
            assert weight_bytes(train(other, device="cpu").model) == weight_bytes(made)
        train(recipe | {"training": recipe["training"] | {"budget": "5 steps"}}, device="cpu")


@contextmanager
def stopping_after(steps: int) -> Iterator[None]:
    """Let a signal arrive in a step."""
    step = Trainer._step

    def stop_requested(self: Trainer) -> None:
        step(self)
        if self.progress.steps == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", stop_requested)
        yield


def recipe_of(rng: Random, sets: dict[str, str], trained: dict[str, str], out: Path) -> dict[str, Any]:
    known = KNOWN | {"teachers": [[trained["dense"]], [trained["dense"], trained["gated"]], ["nothing"]]}
    chosen = rng.sample(list(sets), rng.randint(1, 2))
    recipe: dict[str, Any] = {
        "out": str(out),
        "data": options_of(rng, DataConfig, known) | {"sets": {name: given_set(rng, sets[name]) for name in chosen}},
        "training": {"batch": 2, "warmup": "1 steps"} | options_of(rng, TrainingConfig, known, most=4),
        "validation": {"tokens": 64},
        "checkpoints": {"every": "2 steps"},
    }
    recipe["data"] = {"length": 16} | recipe["data"]
    for name in rng.sample(list(SECTIONS), rng.randint(0, 2)):
        recipe[name] = options_of(rng, SECTIONS[name], known)
    if rng.random() < 0.1:
        recipe["decoder"] = trained["decoder"]
    elif rng.random() < 0.25:
        recipe["start_from"] = trained[rng.choice(["dense", "gated"])]
    else:
        recipe["model"] = {**BASE, **architecture_of(rng)}
    return recipe


def given_set(rng: Random, path: str) -> dict[str, Any]:
    return {"path": path, "holdout": rng.choice([0.1, 0.1, 0.5, 0.0])}
