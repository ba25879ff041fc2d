"""What every task says of itself, and the list of them."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from braidlm.evals.files.hub_data import HubSource
from braidlm.evals.reports.results import TaskResult
from braidlm.evals.scoring.contestant import Contestant
from braidlm.evals.scoring.scorer import Advance
from braidlm.model.config.registry import Registry

TASKS = Registry("task")


class OpenTask(Protocol):
    """A task whose data has been read and checked; it can be given to any number of models."""

    @property
    def count(self) -> int:
        """Items."""

    @property
    def sha256(self) -> str:
        """Of the data."""

    def evaluate(self, task: str, model: Contestant, advance: Advance | None = None) -> TaskResult:
        """One model's result, under the task's name."""


class Task(ABC):
    """One evaluation. A new one is a file in this folder with a class under `@TASKS.register`."""

    description: str
    size: str
    """How much there is of it."""
    licence: str
    metric: str
    places: tuple[str, ...]
    """Where its data is usually found inside the data folder."""
    fetch: str
    """How to get the data: a sentence for someone who has not got it, in which DATA stands for the data folder."""
    collection: str = ""
    """How to get what the data is a part of; said once where several tasks of one collection are missing."""
    hub: HubSource | None = None
    """Where `hub:` finds the data, if the task reads it from there."""
    uses: tuple[str, ...] = ()
    """The user's settings (`contestant.Settings`) that its score depends on."""
    over_run = False
    """Whether its score is one of a run, over all checkpoints (`over_runs.py`)."""
    version = 1
    """Raised when the same model and data would give another score: results kept before no longer count."""

    @abstractmethod
    def open(self, place: Path) -> OpenTask:
        """Read and check the data."""
