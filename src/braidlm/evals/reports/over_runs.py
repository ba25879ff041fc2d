"""Scores that only all checkpoints of a run together have: a task may measure each, and then judge the run by them.

Such a task sets `over_run = True`, and its open data has `over_run(task, checkpoints)` beside `evaluate`. What
`evaluate` found of each checkpoint is kept like any result, so that a run that goes on is judged anew without measuring
twice.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from braidlm.core.errors import BraidError
from braidlm.evals.reports.results import ModelResults, TaskResult
from braidlm.evals.subjects import Subject
from braidlm.evals.tasks import TASKS, OpenTask

FEWEST = 4
"""Checkpoints: a curve of four numbers needs as many."""


@runtime_checkable
class OverRun(Protocol):
    """Open data of a task that judges runs."""

    def over_run(self, task: str, checkpoints: Sequence[ModelResults]) -> TaskResult:
        """One run's result, from the results of its checkpoints."""


def check_runs(tasks: Sequence[str], subjects: Sequence[Subject]) -> None:
    """Refuse tasks of runs of single models, and runs whose checkpoints are too few or say too little."""
    judging = [name for name in tasks if TASKS[name].over_run]
    if not judging:
        return
    if any(subject.run is None for subject in subjects):
        raise BraidError(
            f"'{judging[0]}' judges a run by all of its checkpoints",
            todo="Give run folders, or folders of checkpoints, and --all-checkpoints (all_checkpoints=True).",
        )
    for run, count in Counter(subject.run for subject in subjects).items():
        if count < FEWEST:
            raise BraidError(f"'{judging[0]}' needs {FEWEST} checkpoints or more, and there are {count}", run)
    for subject in subjects:
        if not subject.words:
            raise BraidError(
                "this checkpoint does not say on how many words it was trained",
                str(subject.folder),
                "Name checkpoints as the BabyLM challenge does: chck_1M, chck_2M, ...",
            )


def over_runs(
    tasks: Mapping[str, OpenTask], runs: Mapping[str, Sequence[ModelResults]]
) -> dict[str, dict[str, TaskResult]]:
    """By run and task."""
    judging = {name: data for name, data in tasks.items() if isinstance(data, OverRun)}
    if not judging:
        return {}
    return {
        run: {name: data.over_run(name, checkpoints) for name, data in judging.items()}
        for run, checkpoints in runs.items()
    }
