"""Every recipe that comes with Braid loads, and every tiny one runs."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from braidlm.core.models.folders import load_model
from braidlm.core.models.presets import config_from, is_preset
from braidlm.core.recipes import compose_recipe, is_study, list_recipes
from braidlm.model.config.strict import encode
from braidlm.studies.compare import check_same_batches
from braidlm.studies.decoding import decode_study
from braidlm.studies.running import run_study
from braidlm.training.recipe import decode_recipe
from braidlm.training.train import train
from tests.recipes.toy import kind, with_what_they_read

NAMES = [name for name, _ in list_recipes()]
TINY = [name for name in NAMES if name.startswith("tiny/")]
DOCUMENTS = 150
"""Of every set: enough for a tokenizer, a few batches and the text that is held out."""


@cache
def composed(name: str) -> dict[str, Any]:
    return compose_recipe(name)


def test_there_are_some() -> None:
    assert TINY
    assert len(NAMES) > len(TINY)


@pytest.mark.parametrize("name", NAMES)
def test_it_loads(name: str) -> None:
    data = composed(name)
    if is_preset(data):
        assert config_from(name, vocab_size=100).vocab_size
        return
    if is_study(data):
        study = decode_study(data)
        assert encode(decode_study(encode(study))) == encode(study)
        return
    loaded = decode_recipe(data)
    assert decode_recipe(loaded.as_dict()).as_dict() == loaded.as_dict(), "the resolved recipe is a recipe"


@pytest.mark.parametrize("name", TINY)
def test_it_runs(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For two steps, on a part of its data."""
    run = run_study_of if is_study(composed(name)) else run_training_of
    run(name, tmp_path, tmp_path_factory.getbasetemp() / "tiny-recipes")


def run_training_of(name: str, folder: Path, kept: Path) -> None:
    changes = {"out": folder / "run", "data.cache": kept}
    changes |= {f"data.sets.{each}.documents": DOCUMENTS for each in composed(name)["data"]["sets"]}
    changes |= {"training.budget": "2 steps", "validation.tokens": 500, "samples.tokens": 4}
    run = train(name, [f"{key}={value}" for key, value in changes.items()], device="cpu")
    assert run.finished
    assert run.progress.steps == 2
    load_model(run.model)


def run_study_of(name: str, folder: Path, kept: Path) -> None:
    """Each kind of step in it; steps that differ in numbers and domains alone run once."""
    data = compose_recipe(name, [f"out={folder / 'study'}"])
    kinds = {kind(data, step): step for step in reversed(data["steps"])}
    data["steps"] = with_what_they_read(data["steps"], [*kinds.values()])
    data["data"]["cache"] = str(kept)
    data["validation"]["tokens"] = 500
    for domain in data["domains"].values():
        few = 12 if domain["source"] == "python" else DOCUMENTS  # its documents are whole files
        domain["documents"] = min(domain["documents"], few)
    for step in data["steps"].values():
        if step.get("train") or step.get("model") or step.get("distil"):
            step["train"] = (step.get("train") or {}) | {"epochs": None, "budget": "2 steps"}
        for edit in step.get("edit") or []:
            if isinstance(edit, dict) and "prune" in edit:
                edit["prune"]["tokens"] = 1000
    models = run_study(decode_study(data), device="cpu")
    assert {model.name for model in models} == set(data["steps"])
    assert all(model.run is None or model.run.progress.steps == 2 for model in models)


def test_the_tiny_recipes_of_stories_can_be_compared() -> None:
    """They see the same batches, which those of other texts, lengths and amounts need not."""
    names = ("llama", "modules", "moep", "depths", "shared", "byte-pooling", "next-sentence")
    check_same_batches({name: decode_recipe(composed(f"tiny/{name}")) for name in names})
