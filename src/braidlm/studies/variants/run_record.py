"""What a run folder tells of its run: recipe, cost, bits per byte, wall clock and how it ended."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.models.runs import RECIPE, read_history, read_metrics, training_seconds
from braidlm.core.reading import given_path, read_json, read_yaml
from braidlm.opening.names import StrPath
from braidlm.training.run_folder import budget_of, completed

FAILURES = "failures"
"""The folder, in that of a sweep, of the runs that failed: they may have no folder of their own."""


@dataclass(frozen=True)
class RunRecord:
    """One run; what it did not record is None."""

    name: str
    """Its folder, without what all runs of a table have in common."""
    folder: Path
    recipe: dict[str, Any]
    seed: int | None
    parameters: int | None
    flops_per_token: int | None
    """The cost of a forward pass."""
    steps: int
    tokens: int
    words: int
    """Shown in training."""
    bits_per_byte: float | None
    """The result of the last validation."""
    best_bits_per_byte: float | None
    best_step: int | None
    best_words: int | None
    half: str | None
    """The half of the held-out text that is scored; None where all text is."""
    training_seconds: float
    """Seconds of training alone."""
    wall_seconds: float
    """With validation, samples and saving."""
    hardware: str | None
    started: str | None
    """The time of its first step, in UTC."""
    state: str
    """`done`, `unfinished` (it runs, or was stopped), or `failed: ` and the first line of the error."""

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        return vars(self) | {"folder": str(self.folder)}


def has_runs(folder: Path) -> bool:
    """Whether there is any run in a folder, or one that failed before it had a folder."""
    return any(folder.rglob(RECIPE)) or any(folder.rglob(f"{FAILURES}/*.json"))


def read_runs(folders: Sequence[StrPath]) -> list[RunRecord]:
    """The runs of these folders, in the order in which they were started: each folder is a run, or has runs in it."""
    recipes: dict[Path, dict[str, Any]] = {}
    errors: dict[Path, str] = {}
    for given in folders:
        folder = given_path(given)
        found = sorted(path.parent for path in folder.rglob(RECIPE))  # in a run's own folder there may be a sweep
        failed = sorted(folder.rglob(f"{FAILURES}/*.json"))
        if not found and not failed:
            raise BraidError("there is no run in it", str(given), "Name the folders of runs, sweeps or studies.")
        recipes |= {run: completed(read_yaml(run / RECIPE)) for run in found}
        for file in failed:
            facts, run = read_json(file), file.parent.parent / file.stem
            recipes.setdefault(run, facts["recipe"])
            errors[run] = facts["error"]
    root = os.path.commonpath([folder.absolute().parent for folder in recipes])
    runs = [
        _record(os.path.relpath(folder, root), folder, recipe, errors.get(folder)) for folder, recipe in recipes.items()
    ]
    return sorted(runs, key=lambda run: (run.started is None, run.started or "", run.name))


def _record(name: str, folder: Path, recipe: dict[str, Any], error: str | None) -> RunRecord:
    records = read_metrics(folder)
    history = read_history(folder)
    starts = [record for record in history if record["kind"] == "start"]
    about = starts[-1] if starts else {}
    progress: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "train"), {})
    scored = [record for record in records if record["kind"] == "validation"]
    best = min(scored, key=lambda record: record["bits_per_byte"], default={})
    if error is None and history and history[-1]["kind"] == "failure":
        error = history[-1]["error"]
    is_finished = _is_finished(recipe, progress)
    return RunRecord(
        name=name,
        folder=folder,
        recipe=recipe,
        seed=recipe.get("seed"),
        parameters=about.get("parameters"),
        flops_per_token=about.get("flops_per_token"),
        steps=progress.get("step", 0),
        tokens=progress.get("tokens", 0),
        words=progress.get("words", 0),
        bits_per_byte=scored[-1]["bits_per_byte"] if scored else None,
        best_bits_per_byte=best.get("bits_per_byte"),
        best_step=best.get("step"),
        best_words=best.get("words"),
        half=recipe.get("validation", {}).get("half"),
        training_seconds=training_seconds(records),
        wall_seconds=sum(record.get("seconds", 0.0) for record in records),
        hardware=_hardware(starts),
        started=starts[0]["time"] if starts else None,
        state=f"failed: {error}" if error is not None else "done" if is_finished else "unfinished",
    )


def _is_finished(recipe: dict[str, Any], progress: dict[str, Any]) -> bool:
    budget = budget_of(recipe)
    if budget is None or not progress:
        return False
    return bool(progress["step" if budget.unit == "steps" else budget.unit] >= budget.count)


def _hardware(starts: Sequence[dict[str, Any]]) -> str | None:
    """Every machine that the run was trained on."""
    names = [f"{r['processes']} x {r['device']}" if r["processes"] > 1 else r["device"] for r in starts]
    return ", then ".join(dict.fromkeys(names)) or None
