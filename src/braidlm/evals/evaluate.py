"""`braid eval` as a function: models on tasks, one table, and the learning dynamics of runs.

The verb's name is a built-in function's in Python, so the function is called `evaluate`; `braidlm.eval` is it.
"""

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from braidlm.core.console import progress, warn
from braidlm.core.devices import choose_device
from braidlm.core.errors import BraidError
from braidlm.core.jobs import open_jobs
from braidlm.core.models.folders import versions
from braidlm.core.report.rendering import check_out, write
from braidlm.evals.babylm.averages import babylm_averages
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.harness.tasks import PREFIX, open_harness
from braidlm.evals.reports.dynamics import dynamics_report
from braidlm.evals.reports.scores import scores_report
from braidlm.evals.results import CACHE, Evaluation, ModelResults, ResultCache, TaskResult
from braidlm.evals.scoring.scorer import Scorer
from braidlm.evals.statistics import compare_best
from braidlm.evals.task_data import find_data
from braidlm.evals.tasks import TASKS, OpenTask
from braidlm.evals.tasks.task import expand
from braidlm.opening.names import Names, StrPath
from braidlm.opening.open import open_models
from braidlm.opening.opened_model import OpenedModel

ABOUT_MODELS = ("name", "sha256", "run", "steps", "tokens", "words", "paths", "without")
"""What results say of a model folder."""
MIN_CHECKPOINTS = 4
"""A curve of four parameters needs as many."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def evaluate(
    models: Names | Callable[[], Sequence[OpenedModel]],
    tasks: str | Sequence[str],
    *,
    data: StrPath | None = None,
    data_of: Mapping[str, StrPath] | None = None,
    harness: str | Sequence[str] = (),
    harness_tasks: StrPath | None = None,
    harness_shots: int | None = None,
    all_checkpoints: bool = False,
    paths: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
    settings: Settings | None = None,
    out: StrPath | None = None,
    device: str = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
    cluster: str | None = None,
) -> Evaluation:
    """Score models on tasks: folders, runs (their newest checkpoint, or all of them) or studies (all their models).

    `models` may also be a function that opens them, called once every task is open. Such a model need not be a folder:
    it is what its `load` gives, and its hash says which one it is.
    `data` is the folder in which tasks look for their data, `data_of` gives the data of single tasks; `harness` are
    tasks of lm-evaluation-harness, `harness_tasks` a folder of task files for it, `harness_shots` its number of
    examples; `paths` are the active ones, which each model must have, `without` are modules that are switched off;
    `settings` are for tasks that use them; `out` is a folder for results, which also caches them. With `cluster` (`ray`
    or `ray:ADDRESS`) each model is scored on a node of a Ray cluster, and needs `out`.
    """
    if isinstance(data, Mapping):
        what = "data is the folder in which every task looks for its data, and a mapping was given"
        raise BraidError(what, todo=f"The data of single tasks is called data_of: data_of={dict(data)!r}.")
    settings = settings or Settings()
    if not tasks and not harness:
        raise BraidError("there is no task", todo=f"Name one or several of: {', '.join(TASKS)}.")
    names = expand([tasks] if isinstance(tasks, str) else tasks)
    registered = {name: TASKS[name] for name in names}  # an unknown name is an error that suggests the nearest
    opened = []
    found = find_data(names, data, data_of or {})
    for name, task in registered.items():
        about = {key: getattr(task, key) for key in ("description", "metric", "licence", "version")}
        own = {text: found[text] for text in task.texts or (name,) if text in found}
        read = task().open_with(own, settings)
        opened.append(_opened_task(name, next(iter(own.values())), read, about, settings, task.uses))
    folder = None if harness_tasks is None else Path(harness_tasks)
    for name in dict.fromkeys([harness] if isinstance(harness, str) else harness):
        opened_harness = open_harness(name, folder, harness_shots)
        opened.append(_opened_task(f"{PREFIX}{name}", folder, opened_harness, opened_harness.about, settings))
    _check_settings(opened, settings)
    if cluster is not None and out is None:
        raise BraidError("jobs on a cluster write their results into a folder", "--cluster", "Give one: out=DIR.")
    device = choose_device(device) if cluster is None else device
    if dtype not in DTYPES:
        raise BraidError(f"scores are computed in {' or '.join(DTYPES)}, not in {dtype}")
    if out is not None:
        check_out(out, "braid eval", "results.json", CACHE)
    options = {"all_checkpoints": all_checkpoints, "paths": paths, "without": without}
    folders = models() if callable(models) else open_to_score(models, **options)
    checking: list[Any] = [task.data for task in opened if hasattr(task.data, "check_models")]
    for checked in checking:
        checked.check_models(folders)
    run_tasks: dict[str, Any] = {task.name: task.data for task in opened if hasattr(task.data, "score_run")}
    if run_tasks:
        check_runs(next(iter(run_tasks)), folders)
    cache = None if out is None else ResultCache(Path(out))
    with open_jobs(cluster, out or "", None if device == "auto" else device) as jobs:
        given = opened, settings, cache, device, dtype
        scored = [jobs.start(f"{at}: {one.name}", _model_results, one, *given) for at, one in enumerate(folders, 1)]
        results: list[ModelResults] = jobs.results(scored)
    evaluation = Evaluation(results, {task.name: task.facts for task in opened}, dtype, versions())
    for run, checkpoints in evaluation.runs.items() if run_tasks else ():
        evaluation.over_runs[run] = {name: data.score_run(name, checkpoints) for name, data in run_tasks.items()}
    evaluation.verdicts = compare_best(evaluation.models)
    evaluation.averages = babylm_averages(evaluation)
    if out is not None:
        write(scores_report(evaluation), out, "results", ("md",) if evaluation.runs else ("html", "md"))
        if evaluation.runs:
            write(dynamics_report(evaluation), out, "dynamics")
    return evaluation


eval = evaluate


def open_to_score(models: Names, **options: Any) -> list[OpenedModel]:
    """Models by their names, each read by the library that its folder is of, and checked before any is loaded."""
    opened = open_models(models, "own", **options)
    for model in opened:
        model.check_with_tokenizer()
        _ = model.sha256  # of the files as they are now
    return opened


@dataclass(frozen=True)
class _TaskData:
    name: str
    data: OpenTask
    facts: dict[str, Any]
    """Description, metric, licence, version; the data and its hash; the `settings` that the score depends on."""


def _opened_task(
    name: str, path: Path | None, data: OpenTask, about: dict[str, Any], settings: Settings, uses: Sequence[str] = ()
) -> _TaskData:
    facts = {**about, "data": str(path), "sha256": data.sha256, "count": data.count}
    if uses:
        facts["settings"] = {setting: getattr(settings, setting) for setting in uses}
    return _TaskData(name, data, facts)


def _check_settings(tasks: Sequence[_TaskData], settings: Settings) -> None:
    """Let tasks refuse settings; where no task uses any, warn that those given have no effect."""
    checking: list[Any] = [task.data for task in tasks if hasattr(task.data, "check")]
    for data in checking:
        data.check(settings)
    defaults = asdict(Settings())
    changed = [name for name, value in asdict(settings).items() if value != defaults[name]]
    if changed and not checking and not any("settings" in task.facts for task in tasks):
        warn(f"no task that is evaluated has a use for {', '.join(changed)}")


def _model_results(
    folder: OpenedModel, tasks: list[_TaskData], settings: Settings, cache: ResultCache | None, device: str, dtype: str
) -> ModelResults:
    """One model on all tasks; it is loaded only if a result is not in the cache."""
    results = ModelResults(folder=str(folder.folder), **{name: getattr(folder, name) for name in ABOUT_MODELS})
    model: EvaluatedModel | None = None
    for task in tasks:
        key = {
            "model": folder.sha256,
            "task": task.name,
            "version": task.facts["version"],
            "data": task.data.sha256,
            "dtype": dtype,
            **{name: value for name in ("paths", "without") if (value := getattr(folder, name)) is not None},
            **({"settings": task.facts["settings"]} if "settings" in task.facts else {}),
        }
        result = None if cache is None else cache.find(key)
        if result is None:
            if model is None:
                scorer = Scorer(folder.load(choose_device(device)), dtype=DTYPES[dtype])
                model = EvaluatedModel(scorer, folder.tokenizer, folder.folder, settings)
            result = _evaluate_task(folder, task, model)
            if cache is not None:
                cache.write(key, result)
        results.tasks[task.name] = result
    if model is not None and device != "cpu":
        del model, scorer
        gc.collect()  # frees the memory before the next model is loaded
    return results


def _evaluate_task(folder: OpenedModel, task: _TaskData, model: EvaluatedModel) -> TaskResult:
    with progress(f"{folder.name} {task.name}", 100, "%") as show:

        def advance(done: int, total: int) -> None:
            show(100 * done // total, f"{total:,} tokens")

        try:
            return task.data.evaluate(task.name, model, advance)
        except BraidError as error:
            raise BraidError(error.what, f"{folder.folder}, {task.name}", error.todo) from error


def check_runs(task: str, folders: Sequence[OpenedModel]) -> None:
    """Refuse a task of runs for single models, and for runs with too few checkpoints or unknown amounts of training."""
    if any(folder.run is None for folder in folders):
        todo = "Give run folders, or folders of checkpoints, and --all-checkpoints (all_checkpoints=True)."
        raise BraidError(f"'{task}' judges a run by all of its checkpoints", todo=todo)
    for run, count in Counter(folder.run for folder in folders).items():
        if count < MIN_CHECKPOINTS:
            raise BraidError(f"'{task}' needs {MIN_CHECKPOINTS} checkpoints or more, and there are {count}", run)
    for folder in folders:
        if not folder.words:
            todo = "Name checkpoints as the BabyLM challenge does: chck_1M, chck_2M, ..."
            raise BraidError("this checkpoint does not say on how many words it was trained", str(folder.folder), todo)
