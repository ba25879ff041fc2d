"""Scores of whole runs: a task may measure every checkpoint, and then score the run over all of them.

Such a task sets `scores_runs = True`, and its open data has `score_run(task, checkpoints)` beside `evaluate`. The
results of `evaluate` are cached as any others are, so that a run that goes on is scored again without measuring its
older checkpoints twice.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from braidlm.core.errors import BraidError
from braidlm.evals.results import ModelResults, TaskResult
from braidlm.evals.tasks import TASKS, OpenTask
from braidlm.opening.opened_model import OpenedModel

MIN_CHECKPOINTS = 4
"""A curve of four parameters needs as many."""


@runtime_checkable
class RunTask(Protocol):
    """Open data of a task that scores runs."""

    def score_run(self, task: str, checkpoints: Sequence[ModelResults]) -> TaskResult:
        """One run's result, from the results of its checkpoints."""


def check_runs(tasks: Sequence[str], folders: Sequence[OpenedModel]) -> None:
    """Refuse tasks of runs for single models, and for runs with too few checkpoints or unknown amounts of training."""
    run_tasks = [name for name in tasks if TASKS[name].scores_runs]
    if not run_tasks:
        return
    if any(folder.run is None for folder in folders):
        raise BraidError(
            f"'{run_tasks[0]}' judges a run by all of its checkpoints",
            todo="Give run folders, or folders of checkpoints, and --all-checkpoints (all_checkpoints=True).",
        )
    for run, count in Counter(folder.run for folder in folders).items():
        if count < MIN_CHECKPOINTS:
            raise BraidError(
                f"'{run_tasks[0]}' needs {MIN_CHECKPOINTS} checkpoints or more, and there are {count}", run
            )
    for folder in folders:
        if not folder.words:
            raise BraidError(
                "this checkpoint does not say on how many words it was trained",
                str(folder.folder),
                "Name checkpoints as the BabyLM challenge does: chck_1M, chck_2M, ...",
            )


def run_scores(
    tasks: Mapping[str, OpenTask], runs: Mapping[str, Sequence[ModelResults]]
) -> dict[str, dict[str, TaskResult]]:
    """By run and task."""
    run_tasks = {name: data for name, data in tasks.items() if isinstance(data, RunTask)}
    if not run_tasks:
        return {}
    return {
        run: {name: data.score_run(name, checkpoints) for name, data in run_tasks.items()}
        for run, checkpoints in runs.items()
    }
