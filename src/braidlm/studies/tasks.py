"""Tasks of a study: every model is evaluated on them beside its bits per byte; results are cached in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from braidlm.core.errors import BraidError
from braidlm.evals.evaluate import evaluate
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.results import Evaluation
from braidlm.evals.task_data import VARIABLE, find_data
from braidlm.evals.tasks import TASKS
from braidlm.evals.tasks.task import expand

FOLDER = "tasks"
"""In the study's folder."""
SAY_WHERE = (
    f"Say where data is with `tasks.data=FOLDER` (or {VARIABLE}=FOLDER), or leave the tasks out with `tasks=null`."
)


@dataclass
class TasksConfig:
    """What every model of a study is evaluated on, as `braid eval` does it."""

    names: list[str]
    """Tasks and suites of `braid list tasks`."""
    data: str | None = None
    """The folder in which tasks look for their data; by default that of `braid eval`."""
    settings: Settings = field(default_factory=Settings)
    """Settings of tasks that have some."""

    def __post_init__(self) -> None:
        if not self.names:
            raise BraidError("names: there is no task")
        for name in expand(self.names):
            TASKS[name]  # raises an error that suggests the nearest name

    def check(self) -> None:
        """Raise an error for data that is missing, before any model is trained."""
        find_data(expand(self.names), self.data, {}, SAY_WHERE)

    def evaluate(self, folders: Mapping[str, Path], out: Path, device: str | None) -> Evaluation:
        """Every model on every task, under the name that it is given here."""
        return evaluate(
            dict(folders),
            self.names,
            data=self.data,
            settings=self.settings,
            out=out / FOLDER,
            device=device or "auto",
        )
