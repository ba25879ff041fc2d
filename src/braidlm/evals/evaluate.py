"""`braid eval` as a function: models on tasks, one table, and how a run learned them.

The verb's name is a built-in function's in Python, so the function is called `evaluate`; `braidlm.eval` is it.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from braidlm.core.console import progress, warn
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.models.folders import versions
from braidlm.evals.babylm.average import babylm_averages, facts_of
from braidlm.evals.files.data_places import find_data
from braidlm.evals.harness.tasks import PREFIX, open_harness
from braidlm.evals.reports.folder import check_out, write_folder
from braidlm.evals.reports.keeping import Kept
from braidlm.evals.reports.over_runs import check_runs, over_runs
from braidlm.evals.reports.results import Evaluation, ModelResults, TaskResult
from braidlm.evals.scoring.contestant import Contestant, Settings
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.statistics.verdicts import verdicts
from braidlm.evals.subjects import Place, Subject, open_subjects
from braidlm.evals.suites import expand
from braidlm.evals.tasks import TASKS, OpenTask, Task

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def evaluate(
    models: Place | Sequence[Place] | Mapping[str, Place],
    tasks: str | Sequence[str],
    *,
    data: Place | None = None,
    data_of: Mapping[str, Place] | None = None,
    harness: str | Sequence[str] = (),
    harness_tasks: Place | None = None,
    harness_shots: int | None = None,
    all_checkpoints: bool = False,
    paths: Sequence[str] | None = None,
    settings: Settings | None = None,
    out: Place | None = None,
    device: str = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Evaluation:
    """Score model folders (of a run its newest checkpoint, or all of them) on tasks.

    `data` is the folder in which tasks look for their data, `data_of` says for single tasks where it is; `harness` are
    tasks of lm-evaluation-harness, `harness_tasks` a folder of task files for it, `harness_shots` how many examples it
    shows; `paths` are those to be heard, which each model must have; `settings` are for tasks that have a use for them;
    `out` is a folder for results, in which what was scored before is found again.
    """
    asked = _opened_tasks([tasks] if isinstance(tasks, str) else list(tasks), data, data_of or {}, bool(harness))
    subjects = open_subjects([models] if isinstance(models, (str, Path)) else models, all_checkpoints, paths)
    check_runs([task.name for task in asked], subjects)
    asked += _opened_harness([harness] if isinstance(harness, str) else harness, harness_tasks, harness_shots)
    settings = settings or Settings()
    _check_settings(asked, settings)
    place = choose_device(device)
    if dtype not in DTYPES:
        raise BraidError(f"scores are computed in {' or '.join(DTYPES)}, not in {dtype}")
    kept = None
    if out is not None:
        check_out(Path(out), draws=all_checkpoints)
        kept = Kept(Path(out))
    results = [_results(subject, asked, settings, kept, place, dtype) for subject in subjects]
    found = Evaluation(results, {task.name: task.facts(settings) for task in asked}, dtype, versions())
    found.over_runs = over_runs({task.name: task.data for task in asked}, found.runs)
    found.verdicts = verdicts(found.models)
    found.averages = facts_of(babylm_averages(found))
    if out is not None:
        write_folder(found, Path(out))
    return found


eval = evaluate


@dataclass(frozen=True)
class _Asked:
    """A task with its data open."""

    name: str
    place: Path | None
    data: OpenTask
    about: dict[str, Any]
    """What it is: description, metric, licence, version."""
    uses: tuple[str, ...] = ()
    """The settings that its score depends on."""

    def facts(self, settings: Settings) -> dict[str, Any]:
        about = {**self.about, "data": str(self.place), "sha256": self.data.sha256, "count": self.data.count}
        return about | self.settings(settings)

    def settings(self, settings: Settings) -> dict[str, Any]:
        """Under `settings` those that count, for tasks that have some."""
        return {"settings": {name: getattr(settings, name) for name in self.uses}} if self.uses else {}


@runtime_checkable
class ChecksSettings(Protocol):
    """Open data of a task that may refuse settings, before anything is scored."""

    def check(self, settings: Settings) -> None:
        """Raise a BraidError for what it cannot do."""


def _check_settings(tasks: Sequence[_Asked], settings: Settings) -> None:
    """Let tasks refuse what they cannot do; where none has a use for any setting, say that those given do nothing."""
    checking = [task for task in tasks if isinstance(task.data, ChecksSettings)]
    for task in checking:
        task.data.check(settings)  # type: ignore[attr-defined]
    usual = asdict(Settings())
    given = [name for name, value in asdict(settings).items() if value != usual[name]]
    if given and not checking and not any(task.uses for task in tasks):
        warn(f"no task that is evaluated has a use for {', '.join(given)}")


def _opened_tasks(
    names: list[str], root: Place | None, own: Mapping[str, Place], may_be_none: bool = False
) -> list[_Asked]:
    if not names and not may_be_none:
        raise BraidError("there is no task", todo=f"Name one or several of: {', '.join(TASKS)}.")
    names = expand(names)
    for name in names:
        TASKS[name]  # an unknown one is an error that names the nearest
    places = find_data(names, root, own)
    return [_asked(name, TASKS[name], place) for name, place in places.items()]


def _asked(name: str, task: type[Task], place: Path) -> _Asked:
    about = {key: getattr(task, key) for key in ("description", "metric", "licence", "version")}
    return _Asked(name, place, task().open(place), about, task.uses)


def _opened_harness(names: Sequence[str], folder: Place | None, shots: int | None) -> list[_Asked]:
    """Tasks of lm-evaluation-harness, under names of their own."""
    opened = {name: open_harness(name, folder, shots) for name in dict.fromkeys(names)}
    place = None if folder is None else Path(folder)
    return [_Asked(f"{PREFIX}{name}", place, task, task.about) for name, task in opened.items()]


def _results(
    subject: Subject, tasks: list[_Asked], settings: Settings, kept: Kept | None, device: str, dtype: str
) -> ModelResults:
    """One model on all tasks; it is loaded only if something is not known yet."""
    found = ModelResults(
        subject.name,
        str(subject.folder),
        subject.sha256,
        subject.run,
        subject.steps,
        subject.tokens,
        subject.words,
        subject.paths,
    )
    model: Contestant | None = None
    for task in tasks:
        facts = {
            "model": subject.sha256,
            "task": task.name,
            "version": task.about["version"],
            "data": task.data.sha256,
            "dtype": dtype,
            **({} if subject.paths is None else {"paths": subject.paths}),
            **task.settings(settings),
        }
        result = kept.find(facts) if kept is not None else None
        if result is None:
            if model is None:
                scorer = Scorer(subject.load(device), dtype=DTYPES[dtype])
                model = Contestant(scorer, subject.tokenizer, subject.folder, settings)
            result = _scored(subject, task, model)
            if kept is not None:
                kept.keep(facts, result)
        found.tasks[task.name] = result
    if model is not None and device != "cpu":
        del model, scorer
        gc.collect()  # the next model finds the memory free
    return found


def _scored(subject: Subject, task: _Asked, model: Contestant) -> TaskResult:
    with progress(f"{subject.name} {task.name}", 100, "%") as show:

        def advance(done: int, total: int) -> None:
            show(100 * done // total, f"{total:,} tokens")

        try:
            return task.data.evaluate(task.name, model, advance)
        except BraidError as error:
            raise BraidError(error.what, f"{subject.folder}, {task.name}", error.todo) from error
