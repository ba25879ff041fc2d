"""The results of an evaluation as plain data, for reports and programs, and their cache."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core.errors import BraidError
from braidlm.core.files import json_sha256, write_json
from braidlm.core.reading import read_json
from braidlm.core.report.page import notebook
from braidlm.core.report.report import Table

CACHE = "kept"
"""The folder of cached results in the folder of an evaluation."""

QUOTES = "quotes"
"""The key of a result's `notes` with texts that the page shows: each has a `kind`, a `prompt` and a `text`."""


@dataclass(frozen=True)
class Part:
    """One of the sets, files or domains of a task."""

    score: float
    count: int


@dataclass(frozen=True)
class TaskResult:
    task: str
    metric: str
    score: float
    count: int
    """Items: pairs, documents."""
    standard_error: float | None
    """The standard error of the score, from the spread of the items; None for a single item."""
    higher_is_better: bool = True
    chance: float | None = None
    """The score of guessing."""
    parts: dict[str, Part] = field(default_factory=dict)
    by: dict[str, dict[str, Part]] = field(default_factory=dict)
    """Other partitions of the same items, by attributes of the data: field, phenomenon."""
    also: dict[str, float] = field(default_factory=dict)
    """The scores of the same answers by other metrics."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Counts that help to interpret the score."""
    items: dict[str, list[Any]] = field(default_factory=dict)
    """The model's answers to every item, in the order of the data: cached, and not part of `results.json`."""

    @property
    def shown(self) -> str:
        """The score with its standard error."""
        digits = 2 if max(abs(self.score), 10 * (self.standard_error or 0.0)) >= 10 else 4  # no more than the noise has
        error = "" if self.standard_error is None else f" ± {self.standard_error:.{digits}f}"
        return f"{self.score:.{digits}f}{error}"


@dataclass(frozen=True)
class Comparison:
    """The best model of a task compared with the next (`statistics.py`)."""

    best: str
    next: str
    difference: float
    """By how much the best is better, in the units of the score."""
    standard_error: float | None
    paired: bool
    """Whether the error was computed item by item."""
    clear: bool
    """Whether the difference is significant."""


@dataclass
class ModelResults:
    name: str
    folder: str
    sha256: str
    run: str | None = None
    """The name of the run that it is a checkpoint of, where all checkpoints are evaluated."""
    steps: int | None = None
    tokens: int | None = None
    words: int | None = None
    paths: list[str] | None = None
    """The active paths, if they were chosen."""
    without: list[str] | None = None
    """The modules that are switched off, if any."""
    tasks: dict[str, TaskResult] = field(default_factory=dict)


@dataclass
class Evaluation:
    models: list[ModelResults]
    tasks: dict[str, dict[str, Any]]
    """The description, metric, licence, data and its hash of each task."""
    dtype: str
    versions: dict[str, str]
    over_runs: dict[str, dict[str, TaskResult]] = field(default_factory=dict)
    """By run and task: scores over all checkpoints of a run."""
    verdicts: dict[str, Comparison] = field(default_factory=dict)
    """By task, with several models: the best, and whether it is significantly better."""
    averages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By model: macro averages, where tasks of a suite that has some were evaluated."""

    @property
    def runs(self) -> dict[str, list[ModelResults]]:
        """The checkpoints of each run, in the order of training."""
        runs: dict[str, list[ModelResults]] = {}
        for model in self.models:
            if model.run is not None:
                runs.setdefault(model.run, []).append(model)
        return runs

    def of(self, name: str) -> ModelResults:
        if found := [model for model in self.models if model.name == name]:
            return found[0]
        raise BraidError(f"no model '{name}' was evaluated")

    def _repr_html_(self) -> str:
        """In a notebook: a row for each model, a column for each task, the data below."""
        rows = [
            (m.name, *(m.tasks[task].shown if task in m.tasks else None for task in self.tasks)) for m in self.models
        ]
        notes = [f"{task}: {facts['metric']}; data {facts['data']}" for task, facts in self.tasks.items()]
        return notebook(Table(("model", *self.tasks), rows), notes)

    def facts(self) -> dict[str, Any]:
        """Plain data, as `results.json` holds it."""
        facts = {"format": 1, **asdict(self)}
        for results in [*(model["tasks"] for model in facts["models"]), *facts["over_runs"].values()]:
            for result in results.values():
                del result["items"]
        return facts


class ResultCache:
    """A folder of results, each under the hash of what it depends on, so that nothing is scored twice."""

    def __init__(self, folder: Path):
        self.folder = folder / CACHE

    def find(self, key: dict[str, Any]) -> TaskResult | None:
        """The result for exactly this key; a damaged file counts as missing."""
        try:
            facts = read_json(self._path(key))["result"]
            by = {kind: _parts(groups) for kind, groups in facts.get("by", {}).items()}
            return TaskResult(**{**facts, "parts": _parts(facts["parts"]), "by": by})
        except (BraidError, KeyError, TypeError, AttributeError):
            return None

    def write(self, key: dict[str, Any], result: TaskResult) -> None:
        write_json(self._path(key), {"of": key, "result": asdict(result)})

    def _path(self, key: dict[str, Any]) -> Path:
        return self.folder / f"{key['task']}-{json_sha256(key)[:24]}.json"


def _parts(facts: dict[str, dict[str, Any]]) -> dict[str, Part]:
    return {name: Part(**part) for name, part in facts.items()}
