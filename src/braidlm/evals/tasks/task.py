"""The base class of tasks, their registry, and the suites: names that stand for several tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from braidlm.evals.babylm.conventions import COMMAND, FAST, FULL, GLUE, SOURCE, babylm_locations
from braidlm.evals.evaluated_model import EvaluatedModel, Settings
from braidlm.evals.results import TaskResult
from braidlm.evals.scoring.scorer import ProgressCallback
from braidlm.model.config.registry import Registry

T = TypeVar("T")
HUB = "hub:"
"""The beginning of a data set's name on the Hub."""
SUITES: dict[str, tuple[str, ...]] = {
    "babylm_fast": tuple(FAST),
    "babylm_full": tuple(FULL),
    "glue_babylm": tuple(GLUE),
    "choice": ("arc_easy", "arc_challenge", "winogrande", "hellaswag", "piqa", "openbookqa", "boolq", "lambada"),
    "bmlama": ("bmlama17", "bmlama53"),
}
"""The evaluations of BabyLM 2025: for checkpoints, for a finished model, and with fine-tuning. Age of acquisition
(`aoa`) needs all checkpoints of a run and is in no suite. `choice` has the tasks that many papers report without
fine-tuning, `bmlama` facts in several languages."""


@dataclass(frozen=True)
class HubSource:
    name: str
    config: str | None = None
    splits: tuple[str, ...] = ("test",)
    revision: str | None = None
    sets: bool = False
    """Whether each configuration is one of the task's sets: then a file for each, of the first split."""

    @property
    def command(self) -> str:
        """A sentence on how to get the data; `{task}` is to be filled in."""
        return f"`--data {{task}}={HUB}` gets it from the Hub (`{self.name}`)."


def expand(names: Sequence[str]) -> list[str]:
    """Tasks for names of suites and tasks, each once, in the order of the names."""
    return list(dict.fromkeys(task for name in names for task in SUITES.get(name, (name,))))


class TaskRegistry(Registry):
    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds a task as `name`, with instructions to get its data."""

        def add(task: Any) -> Any:
            if task.babylm:
                task.locations = (*babylm_locations(*task.babylm), *task.locations)
                task.fetch = task.fetch or f"It is `{task.babylm[0]}` of {SOURCE}."
                task.collection = COMMAND
            task.fetch = (task.fetch or task.hub.command).replace("{task}", name)
            return super(TaskRegistry, self).register(name)(task)

        return add

    def declare(
        self, name: str, base: "type[Task]", description: str, size: str, *babylm: str, **attributes: Any
    ) -> None:
        """Add a task that differs from its base class only in attributes."""
        described = {"description": description, "size": size, "babylm": babylm}
        self.register(name)(type(name, (base,), {**described, **attributes}))


TASKS = TaskRegistry("task")


class OpenTask(Protocol):
    """A task whose data has been read and checked, for any number of models.

    It may also have `check(settings)` and `check_models(models)`, which refuse before anything is scored; and where
    a run is scored by the results of all its checkpoints, `score_run(task, checkpoints)`.
    """

    @property
    def count(self) -> int:
        """The number of items."""

    @property
    def sha256(self) -> str:
        """The hash of the data."""

    def evaluate(self, task: str, model: EvaluatedModel, advance: ProgressCallback | None = None) -> TaskResult:
        """One model's result, under the task's name."""


class Task:
    """One evaluation. A new one is a file in this folder with a class under `@TASKS.register`."""

    description: str
    size: str
    """The amount of data, in words."""
    licence: str
    metric: str
    locations: tuple[str, ...] = ()
    """The usual locations of its data inside the data folder."""
    babylm: tuple[str, ...] = ()
    """The paths of its data in that of the BabyLM challenge, from which locations and instructions follow."""
    fetch: str = ""
    """How to get the data: a sentence for someone who does not have it, in which DATA stands for the data folder, and
    `{task}` for the task's name; not needed for data of the BabyLM challenge or on the Hub."""
    collection: str = ""
    """How to get the collection that the data is part of; shown once where several tasks of it are missing."""
    texts: tuple[str, ...] = ()
    """Names of the texts that it reads, `--data NAME=PATH`, in place of data under its own name; it needs the first."""
    built_in = False
    """Whether it makes its items itself, so that no data has to be found."""
    hub: HubSource | None = None
    """The data set for `hub:`, if the task can read it from the Hub."""
    uses: tuple[str, ...] = ()
    """The fields of `Settings` that its score depends on."""
    version = 1
    """Raised when the same model and data would give another score: results cached before no longer count."""

    def open(self, path: Path) -> OpenTask:
        """Read and check the data; a task has this method or the next."""
        if type(self).open_with is Task.open_with:
            raise NotImplementedError(f"{type(self).__name__} has neither `open` nor `open_with`")
        return self.open_with({"".join(self.texts[:1]): path}, Settings())

    def open_with(self, paths: Mapping[str, Path], settings: Settings) -> OpenTask:
        """Read and check the data in the ways that the settings choose; there is one path, or those of its `texts`."""
        (path,) = paths.values()
        return self.open(path)
