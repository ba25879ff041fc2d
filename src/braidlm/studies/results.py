"""What is known of a model: the one record of studies, comparisons, sweeps and the table of any runs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from braidlm.core.errors import BraidError
from braidlm.core.models.runs import HISTORY, RECIPE, read_metrics, read_records
from braidlm.core.reading import given_path, read_json, read_yaml
from braidlm.opening.names import StrPath, find_model, title_of
from braidlm.studies.study import Role, Study
from braidlm.training.run_folder import budget_of, completed

FAILURES = "failures"
"""The folder, in that of a sweep, of the runs that failed: they may have no folder of their own."""
STUDY_FACTS = (
    *("name", "kind", "seed", "folder", "run_folder", "parameters", "active_parameters", "flops_per_token", "tokens"),
    *("words", "seconds", "wall_seconds", "bits", "curve", "silenced", "trainable", "tasks", "task_errors", "babylm"),
    "halves",
)
"""What the results of a study have of each model."""
RUN_FACTS = (
    *("seed", "parameters", "flops_per_token", "steps", "tokens", "words", "bits_per_byte", "best_bits_per_byte"),
    *("best_step", "best_words", "half", "training_seconds", "wall_seconds", "hardware", "started", "state"),
)
"""The columns of the CSV file of runs, after those that differ."""
Bits = dict[str, float]
"""Bits per byte, by domain."""


class Point(NamedTuple):
    """A training loss in nats per token, or a validation in bits per byte, at one point of a training."""

    tokens: int
    words: int
    value: float
    bits: Bits
    """A validation's bits per byte of each domain."""
    seconds: float = 0.0
    """Seconds of training alone, without validation and saving."""
    step: int = 0

    def seen(self, unit: str) -> int:
        """How far the training had come, in words or tokens."""
        return self.words if unit == "words" else self.tokens


@dataclass(kw_only=True)
class ModelResult:
    """One model: what it costs, how it was trained and what it reaches. What is not known is None."""

    name: str
    folder: Path
    """Its model folder, or its run, which opens as the newest checkpoint."""
    kind: Role = "variant"
    """What it is in the tables of a study."""
    seed: int | None = None
    run_folder: Path | None = None
    """None for a model that was only edited, or given."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe of its run."""
    parameters: int | None = None
    active_parameters: int | None = None
    """The parameters that take part in computing one token."""
    flops_per_token: int | None = None
    """The cost of a forward pass."""
    trainable: int | None = None
    steps: int = 0
    tokens: int = 0
    """Seen in training; for a composed model, after it was composed, for a variant, after its edits, for an average by
    all members together."""
    words: int = 0
    """The words of these tokens."""
    tokens_per_second: float | None = None
    """The median of the training's records; the first, in which it warms up, does not count where there are others."""
    memory: int | None = None
    """The peak of the bytes that the training took."""
    seconds: float = 0.0
    """Seconds of training alone, without validation, samples and saving; for an average, of its members together."""
    wall_seconds: float = 0.0
    """Seconds of the whole run up to its last record, everything included; 0 where its records do not say."""
    losses: list[Point] = field(default_factory=list)
    curve: list[Point] = field(default_factory=list)
    bits: Bits = field(default_factory=dict)
    """Bits per byte of held-out text: of the last validation, or in a study measured again in float32."""
    halves: dict[str, Bits] = field(default_factory=dict)
    """Bits per byte on both halves of the held-out text, where `validation.half` of a study names one of them."""
    silenced: dict[str, Bits] = field(default_factory=dict)
    """The bits per byte of a composed model when one path is inactive, by that path."""
    tasks: dict[str, float] = field(default_factory=dict)
    task_errors: dict[str, float] = field(default_factory=dict)
    """The standard errors of these scores, from their items, where they are known."""
    babylm: dict[str, float] = field(default_factory=dict)
    """Where BabyLM's tasks are among them, scores by the columns of the MoEP paper's Table 1."""
    hardware: str | None = None
    """Every machine that the run was trained on."""
    started: str | None = None
    """The time of its first step, in UTC."""
    state: str = "done"
    """`done`, `unfinished` (it runs, or was stopped), or `failed: ` and the first line of the error."""

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    @property
    def bits_per_byte(self) -> float | None:
        """The result of the last validation, over all held-out text."""
        return self.curve[-1].value if self.curve else None

    @property
    def best(self) -> Point | None:
        """The best validation."""
        return min(self.curve, key=lambda point: point.value, default=None)

    @property
    def half(self) -> str | None:
        """The half of the held-out text that is scored; None where all text is."""
        return self.recipe.get("validation", {}).get("half")

    def facts(self, keys: Sequence[str] = STUDY_FACTS) -> dict[str, Any]:
        """Plain data."""
        values = {key: getattr(self, key) for key in keys}
        values |= {key: str(value) for key, value in values.items() if isinstance(value, Path)}
        return values | ({"curve": [[p.tokens, p.words, p.bits] for p in self.curve]} if "curve" in keys else {})

    def run_facts(self) -> dict[str, Any]:
        """Plain data of its run, as the table of runs has them."""
        best = self.best
        own: dict[str, Any] = {"training_seconds": self.seconds, "best_words": best and best.words}
        own |= {"best_bits_per_byte": best and best.value, "best_step": best and best.step}
        known = {key: own[key] if key in own else getattr(self, key) for key in RUN_FACTS}
        return {"name": self.name, "folder": str(self.folder), "recipe": self.recipe, **known}


def read_run(name: str, folder: Path, recipe: dict[str, Any] | None = None, error: str | None = None) -> ModelResult:
    """What a run folder tells, also of a run that is not finished or that ended with an `error`."""
    recipe = completed(read_yaml(folder / RECIPE)) if recipe is None else recipe
    records, history = read_metrics(folder), read_records(folder / HISTORY)
    starts = [record for record in history if record["kind"] == "start"]
    about, steps = starts[-1] if starts else {}, [record for record in records if record["kind"] == "train"]
    last, speeds = steps[-1] if steps else {}, [record["tokens_per_second"] for record in steps]
    if error is None and history and history[-1]["kind"] == "failure":
        error = history[-1]["error"]
    losses: list[Point] = []
    seconds = 0.0  # the time comes from the tokens of each record and their rate
    for before, now in pairwise([{"tokens": 0}, *steps]):
        seconds += (now["tokens"] - before["tokens"]) / now["tokens_per_second"]
        losses.append(Point(now["tokens"], now.get("words", 0), now["loss"], {}, seconds, now["step"]))
    curve = [_validation(record, losses) for record in records if record["kind"] == "validation"]
    machines = [f"{r['processes']} x {r['device']}" if r["processes"] > 1 else r["device"] for r in starts]
    budget = budget_of(recipe)
    is_finished = last and budget and last["step" if budget.unit == "steps" else budget.unit] >= budget.count
    return ModelResult(
        name=name,
        folder=folder,
        seed=recipe.get("seed"),
        run_folder=folder,
        recipe=recipe,
        parameters=about.get("parameters"),
        flops_per_token=about.get("flops_per_token"),
        steps=last.get("step", 0),
        tokens=last.get("tokens", 0),
        words=last.get("words", 0),
        tokens_per_second=median(speeds[1:] or speeds) if speeds else None,
        memory=max((record["memory"] for record in steps if "memory" in record), default=None),
        seconds=seconds,
        wall_seconds=sum(record.get("seconds", 0.0) for record in records),
        losses=losses,
        curve=curve,
        bits=curve[-1].bits if curve else {},
        hardware=", then ".join(dict.fromkeys(machines)) or None,
        started=starts[0]["time"] if starts else None,
        state=f"failed: {error}" if error is not None else "done" if is_finished else "unfinished",
    )


def _validation(record: dict[str, Any], losses: list[Point]) -> Point:
    """A validation, at the time of the training's record nearest to it."""
    nearest = min(losses, key=lambda point: abs(point.tokens - record["tokens"]), default=None)
    bits = {domain: score["bits_per_byte"] for domain, score in record.get("sets", {}).items()}
    seconds = 0.0 if nearest is None else nearest.seconds
    return Point(record["tokens"], record.get("words", 0), record["bits_per_byte"], bits, seconds, record["step"])


def has_runs(folder: Path) -> bool:
    """Whether there is any run in a folder, or one that failed before it had a folder."""
    return any(folder.rglob(RECIPE)) or any(folder.rglob(f"{FAILURES}/*.json"))


def read_runs(folders: Sequence[StrPath]) -> list[ModelResult]:
    """The runs of these folders, in the order in which they were started: each folder is a run, or has runs in it. The
    name of a run is its folder, without what all runs have in common."""
    recipes: dict[Path, dict[str, Any]] = {}
    errors: dict[Path, str] = {}
    for given in folders:
        folder = given_path(given)
        if not has_runs(folder):
            raise BraidError(
                "there is no run in it", str(given), "Name folders of runs; `--text FILE` compares models."
            )
        for path in sorted(folder.rglob(RECIPE)):  # in a run's own folder there may be a sweep
            recipes[path.parent] = completed(read_yaml(path))
        for file in sorted(folder.rglob(f"{FAILURES}/*.json")):
            facts, run = read_json(file), file.parent.parent / file.stem
            recipes.setdefault(run, facts["recipe"])
            errors[run] = facts["error"]
    root = os.path.commonpath([folder.absolute().parent for folder in recipes])
    runs = [read_run(os.path.relpath(one, root), one, recipe, errors.get(one)) for one, recipe in recipes.items()]
    return sorted(runs, key=lambda run: (run.started is None, run.started or "", run.name))


@dataclass
class StudyResults:
    """All models of a study."""

    study: Study
    models: list[ModelResult]
    chance: dict[str, float] = field(default_factory=dict)
    """The score of guessing, by task, where it is known."""

    def __post_init__(self) -> None:
        self.domains = list(self.study.domains)
        self.unit = "words" if self.study.validation.every.unit == "words" else "tokens"
        """The unit of learning curves: words where a training is validated by words, else tokens."""

    def names(self, *kinds: Role) -> list[str]:
        """Names of the models of these kinds, in the order of the study."""
        return list(dict.fromkeys(m.name for m in self.models if not kinds or m.kind in kinds))

    def of(self, name: str, *kinds: Role) -> list[ModelResult]:
        """A model with every seed."""
        return [m for m in self.models if m.name == name and (not kinds or m.kind in kinds)]

    def as_dict(self) -> dict[str, Any]:
        """Facts for programs."""
        models = [model.facts() for model in self.models]
        return {"study": self.study.name, "seeds": self.study.seeds, "chance": self.chance, "models": models}

    def before(self, model: ModelResult) -> list[ModelResult]:
        """The models whose training a model stands on beside its own: what it is made of or was trained on from. The
        tokens and seconds of an average are its members' already."""
        study, name = self.study, model.name
        if name not in study.steps:  # a folder that was given
            return []
        is_average = model.kind == "average"
        names = set(study.before(name)) - set(study.steps[name].reads if is_average else ())
        seeds = study.seeds if is_average and study.is_once(name) else [model.seed]
        return [m for m in self.models if m.name in names and m.seed in seeds]

    def base_of(self, variant: ModelResult) -> ModelResult:
        """What a variant was made of in the end, with the same seed."""
        base = self.study.base_of(variant.name)
        name = base if base in self.study.steps else title_of(find_model(base))
        return next(m for m in self.models if m.name == name and m.seed == variant.seed)
