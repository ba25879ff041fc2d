"""`braid train`: a recipe into a run folder, from the beginning or from where it was stopped."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import sha256_of, write_text
from braidlm.core.folders import WEIGHTS, check_vocabulary, load_config, load_model
from braidlm.data.catalog import OpenData, open_data
from braidlm.model.configuration_braid import BraidConfig
from braidlm.model.modeling_braid import BraidForCausalLM
from braidlm.training.checkpoints import Checkpoints
from braidlm.training.loop import Trainer
from braidlm.training.parallel import Place, join_group, wait_for_all
from braidlm.training.progress import Progress
from braidlm.training.recipe import LoadedRecipe, decode_recipe, load_recipe
from braidlm.training.tracking import Tracker

RECIPE_FILE = "recipe.yaml"


@dataclass
class Run:
    """What a training left behind."""

    folder: Path
    model: Path
    """The newest model folder."""
    progress: Progress
    finished: bool


def train(
    recipe: str | dict[str, Any], overrides: list[str] | None = None, device: str | None = None, fresh: bool = False
) -> Run:
    """Train as a recipe says (a name, a file, or its content). The same call again goes on where it was stopped.

    `fresh` throws away what the run folder holds.
    """
    loaded = load_recipe(recipe, overrides) if isinstance(recipe, str) else decode_recipe(recipe)
    with join_group(device) as place:
        if not place.is_main:
            console.set_quiet(True)
        return _train(loaded, place, fresh)


def _train(loaded: LoadedRecipe, place: Place, fresh: bool) -> Run:
    recipe, folder = loaded.recipe, Path(loaded.recipe.folder)
    if place.is_main:
        if fresh and folder.exists():
            shutil.rmtree(folder)
        _claim(folder, loaded)
        data = open_data(recipe.data)  # the main process prepares what is missing, the others find it there
    wait_for_all(place)
    if not place.is_main:
        data = open_data(recipe.data)
    torch.manual_seed(recipe.seed)
    model = _make_model(loaded, data).to(place.device)
    torch.manual_seed(recipe.seed * 1000 + place.rank)  # dropout differs between processes, weights do not
    checkpoints = Checkpoints(folder, place, recipe.checkpoints.keep)
    if place.is_main:
        checkpoints.remove_leftovers()
    trainer = Trainer(recipe, model, data, checkpoints, _lineage_maker(loaded, data), place)
    name = checkpoints.newest_good()
    if name is not None:
        trainer.restore(name)
    return _run(trainer, folder, checkpoints, resumed=name)


def _run(trainer: Trainer, folder: Path, checkpoints: Checkpoints, resumed: str | None) -> Run:
    recipe, progress = trainer.recipe, trainer.progress
    finished = progress.done(recipe.training.budget.unit) >= recipe.training.budget.count
    if finished:
        console.say(f"{folder} is finished already ({recipe.training.budget}).")
    else:
        if resumed:
            console.say(f"Going on from checkpoint {resumed} (step {progress.steps:,}).")
        finished = _track(trainer, folder)
    newest = checkpoints.newest_good()
    assert newest is not None  # the end, and a gentle stop, are always saved
    if not finished:
        console.say(f"Stopped and saved as {newest}. The same command goes on from there.")
    return Run(folder, checkpoints.models / newest, trainer.progress, finished)


def _track(trainer: Trainer, folder: Path) -> bool:
    if not trainer.place.is_main:
        return trainer.run(None)
    tracker = Tracker(folder, trainer.recipe.log, trainer.recipe.name, trainer.progress.steps)
    try:
        return trainer.run(tracker)
    finally:
        tracker.close()


def _claim(folder: Path, loaded: LoadedRecipe) -> None:
    """Write the resolved recipe into the run folder, or check that the run there has the same."""
    import yaml

    text = yaml.safe_dump(loaded.as_dict(), sort_keys=False, allow_unicode=True)
    path = folder / RECIPE_FILE
    if path.is_file():
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
        changed = list(_changes(before, yaml.safe_load(text)))
        if changed:
            raise BraidError(
                "this run folder belongs to another recipe: " + "; ".join(changed[:5]),
                str(folder),
                "Give the new run a folder of its own (out=DIR), or start this one anew with --fresh.",
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise BraidError("this folder exists and is not a run", str(folder), "Choose another with out=DIR.")
    write_text(path, text)


def _changes(before: Any, now: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [c for k in keys for c in _changes(before.get(k), now.get(k), f"{where}.{k}" if where else k)]
    return [] if before == now else [f"{where} was {before} and is {now}"]


def _make_model(loaded: LoadedRecipe, data: OpenData) -> BraidForCausalLM:
    """A fresh model, or the one to start from."""
    start = loaded.recipe.start_from
    if start is not None:
        return _start_from(Path(start), loaded, data)
    vocab_size = loaded.vocab_size or data.tokenizer.vocab_size
    check_vocabulary(vocab_size, data.tokenizer, "model.vocab_size")
    assert loaded.architecture is not None
    _check_length(loaded.architecture.context, loaded.recipe.data.length)
    config = BraidConfig(architecture=loaded.architecture, vocab_size=vocab_size, **_special_ids(data))
    return BraidForCausalLM(config)


def _start_from(start: Path, loaded: LoadedRecipe, data: OpenData) -> BraidForCausalLM:
    config = load_config(start)
    check_vocabulary(config.vocab_size, data.tokenizer, str(start))
    if loaded.architecture is not None:
        wanted = BraidConfig(architecture=loaded.architecture, vocab_size=loaded.vocab_size or config.vocab_size)
        changed = _changes(config.architecture, wanted.architecture, "model")
        if config.vocab_size != wanted.vocab_size:
            changed.append(f"model.vocab_size was {config.vocab_size} and is {wanted.vocab_size}")
        if changed:
            raise BraidError(
                "the model to start from has another shape: " + "; ".join(changed[:5]),
                str(start),
                "Leave out `model` to use the folder's own architecture.",
            )
    return load_model(start)


def _check_length(context: int, length: int) -> None:
    if length > context:
        raise BraidError(
            f"data.length is {length} and the model's context only {context}",
            todo="Raise model.context or lower data.length.",
        )


def _special_ids(data: OpenData) -> dict[str, int | None]:
    tokenizer = data.tokenizer
    pad = tokenizer.pad_id if tokenizer.pad_id is not None else tokenizer.eos_id
    return {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id, "pad_token_id": pad}


def _lineage_maker(loaded: LoadedRecipe, data: OpenData) -> Any:
    recipe = loaded.as_dict()
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    sources: list[dict[str, Any]] = [
        {"data": s.name, "tokens": len(s), "words": s.words, "subset": vars(s.subset)} for s in data.train
    ]
    if loaded.recipe.start_from:
        start = Path(loaded.recipe.start_from)
        sources.append({"model": start.name, "sha256": sha256_of(start / WEIGHTS)})

    def lineage(training: dict[str, Any]) -> dict[str, Any]:
        return {
            "made_by": "braid train",
            "recipe": recipe,
            "recipe_sha256": digest,
            "sources": sources,
            "training": training,
        }

    return lineage
