"""A run's folder: it belongs to one recipe, and only one process group works in it."""

import contextlib
import copy
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from braidlm.core import console
from braidlm.core.differences import changes, listed, with_changes
from braidlm.core.errors import BraidError
from braidlm.core.files import explained_disk_errors, locked_folder, write_yaml
from braidlm.core.models.runs import CHECKPOINTS, HISTORY, METRICS, PAGE, RECIPE, is_run, training_of
from braidlm.core.reading import read_yaml
from braidlm.data.loading.order import FOLDER as ORDER
from braidlm.training.amounts import Amount, Progress, parse_amount
from braidlm.training.recipe import TrainingConfig, decode_recipe
from braidlm.training.schedules import LearningRate

RUN_ENTRIES = (PAGE, METRICS, HISTORY, CHECKPOINTS, "states", "tensorboard", "wandb", "wandb-id", ORDER, RECIPE)
"""What a run writes into its folder; the recipe, which marks the folder as a run, is removed last."""
NOT_IDENTITY = (
    *("name", "out", "licence", "log", "samples", "validation.every", "validation.tokens", "checkpoints.keep"),
    *("training.threads", "training.activation_checkpointing", "training.parallel", "data.cache_gb"),
)
"""Keys of logging, display, storage, speed and memory: a run whose recipe differs in these alone is the same run."""


def check_folder(folder: Path, recipe: dict[str, Any], fresh: bool) -> None:
    """Refuse a folder that holds something else than this run; nothing is written."""
    inside = [] if fresh else [folder / name for name in RUN_ENTRIES]
    for path in (folder, *inside, *(item for entry in inside if entry.is_dir() for item in sorted(entry.iterdir()))):
        # As a disk that is not mounted leaves it: what the link held is not lost.
        if path.is_symlink() and not path.exists():
            todo = "Restore what it pointed to, or remove the link; then run the same command again."
            raise BraidError(f"this link leads to nothing ({os.readlink(path)})", str(path), todo)
    if folder.exists() and not folder.is_dir():
        raise BraidError("a file stands where the run's folder should be", str(folder), "Choose another with out=DIR.")
    if is_run(folder):
        before = recipe if fresh else completed(read_yaml(folder / RECIPE))
        if changed := list(changes(identity(before, recipe), identity(recipe, recipe))):
            raise BraidError(
                with_changes("this run folder belongs to another recipe (the folder's -> yours)", changed),
                str(folder),
                "To go on with the folder's run, leave these keys as they were. To begin another, give it a folder of "
                "its own (name=NAME or out=DIR), or let --fresh remove the run that is there.",
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise BraidError("this folder exists and is not a run", str(folder), "Choose another with out=DIR.")


def completed(recipe: Any) -> Any:
    """A saved recipe with the defaults of keys that the version which saved it did not have."""
    try:
        return decode_recipe(recipe).as_dict()
    except (BraidError, AttributeError):  # it was changed by hand: it is compared as it is
        return recipe


def identity(recipe: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What makes a run the run it is. A budget that is larger `now` is the same run, which goes on."""
    kept = copy.deepcopy(recipe)
    for *sections, key in (address.split(".") for address in NOT_IDENTITY):
        section: Any = kept
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(key, None)
    had, has = budget_of(recipe), budget_of(now)
    if had is not None and has is not None and had.unit == has.unit and had.count <= has.count:
        kept["training"]["budget"] = now["training"]["budget"]
    return kept


def budget_of(recipe: dict[str, Any] | None) -> Amount | None:
    """The budget of a resolved recipe, as it is written; None where there is none."""
    try:
        return Amount(**parse_amount((recipe or {})["training"]["budget"]))
    except (BraidError, KeyError, TypeError):
        return None


def earlier_budgets(lineage: dict[str, Any], training: TrainingConfig, progress: Progress) -> list[dict[str, Any]]:
    """The budgets under which the steps so far were trained, each with the step that it was used up to. Says what a
    larger one means for the learning rate."""
    budgets = list(training_of(lineage).get("earlier_budgets") or [])
    before = budget_of(lineage.get("recipe"))
    if before is None or before == training.budget:
        return budgets
    was, now = (LearningRate(each)(progress, progress) for each in (replace(training, budget=before), training))
    console.say(
        f"The budget was {before} and is {training.budget}. From here on schedules are those of the larger budget: "
        f"the learning rate was {was:.3g} and goes on at {now:.3g}."
    )
    return [*budgets, {"budget": str(before), "until_step": progress.steps}]


def _remove_run(folder: Path) -> None:
    """Remove what a run writes; anything else in its folder is somebody's own."""
    for item in (folder / name for name in RUN_ENTRIES):
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink(missing_ok=True)
    if others := sorted(item.name for item in folder.iterdir()):
        console.warn(f"{folder}: not of the run, and kept: {listed(others)}")


def _say_what_is_held_out(before: Any, now: dict[str, Any]) -> None:
    """Say that validations are of another amount of text from here on, with which those before do not compare."""
    was, has = (completed(one).get("validation", {}).get("tokens") for one in (before, now))
    if was != has:
        amounts = ["all tokens" if one is None else f"at most {one:,} tokens" for one in (was, has)]
        console.say("Validation read {} of each data set and reads {} from here on.".format(*amounts))


@contextlib.contextmanager
def claimed(folder: Path, recipe: dict[str, Any], fresh: bool) -> Iterator[None]:
    """Create the folder with this run's recipe, unless it is there, and hold its lock while the block runs."""
    with locked_folder(folder, "train", "with out=DIR"):
        if fresh:
            with explained_disk_errors(folder):
                _remove_run(folder)
        if not is_run(folder):
            write_yaml(folder / RECIPE, recipe)
        yield


def update_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """Write the recipe of a run that goes on with another display or a larger budget, when nothing refused it."""
    before = read_yaml(folder / RECIPE)
    if before != recipe:
        _say_what_is_held_out(before, recipe)
        write_yaml(folder / RECIPE, recipe)
