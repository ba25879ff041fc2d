"""The results of a comparison: what each model costs, how fast it trains and what it reaches."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.core.models.runs import read_metrics
from braidlm.core.report.notebook import html_table
from braidlm.opening.open import open_model
from braidlm.training.train import Run

TRAINING_FLOPS = 3
"""Forward and backward pass, in forward passes."""


class Point(NamedTuple):
    """A value at one point of a training."""

    tokens: int
    seconds: float
    """Of training alone, without validation and saving."""
    value: float


@dataclass
class ComparedModel:
    """One model of a comparison."""

    name: str
    folder: Path
    """Its model folder."""
    run_folder: Path
    parameters: int
    active_parameters: int
    """Those that take part in computing one token."""
    flops_per_token: int
    """Of a forward pass, at the length of the training sequences."""
    tokens: int
    """Seen in training."""
    tokens_per_second: float | None
    """The median of the training's records; the first, in which it warms up, does not count where there are others."""
    memory: int | None
    """The peak of the bytes that the training took; None where it was not measured."""
    seconds: float
    """Of training alone."""
    bits_per_byte: float | None
    """Of the last validation, over all held-out text; None if there is none."""
    bits: dict[str, float] = field(default_factory=dict)
    """The same for each data set."""
    losses: list[Point] = field(default_factory=list)
    """Training loss in nats per token."""
    validations: list[Point] = field(default_factory=list)
    """Bits per byte."""

    def training_flops(self, tokens: int) -> int:
        return TRAINING_FLOPS * self.flops_per_token * tokens


@dataclass
class Comparison:
    """Models that were trained on the same batches."""

    folder: Path
    models: list[ComparedModel]
    settings: dict[str, Any]
    """What they have in common, in words."""
    differences: dict[str, dict[str, Any]]
    """By the key of a recipe, the value of each model."""

    @property
    def data_sets(self) -> list[str]:
        return list(self.models[0].bits)

    def facts(self) -> dict[str, Any]:
        """Plain data, as `results.json` holds it."""
        paths = [{"folder": str(model.folder), "run_folder": str(model.run_folder)} for model in self.models]
        models = [asdict(model) | path for model, path in zip(self.models, paths, strict=True)]
        return {"format": 1, **self.settings, "models": models, "differences": self.differences}

    def _repr_html_(self) -> str:
        keys = ("name", "parameters", "active_parameters", "flops_per_token", "tokens_per_second", "bits_per_byte")
        rows = [[getattr(model, key) for key in keys] for model in self.models]
        return html_table([key.replace("_", " ") for key in keys], rows)


def measured(name: str, run: Run, memory: int | None, length: int) -> ComparedModel:
    """A trained model with what its run recorded."""
    records = read_metrics(run.folder)
    losses = list(_training(records))
    validations = [record for record in records if record["kind"] == "validation"]
    sets = validations[-1]["sets"] if validations else {}
    cost = model_cost(skeleton(open_model(run.model, "braid").config), length)
    speeds = [record["tokens_per_second"] for record in records if record["kind"] == "train"]
    return ComparedModel(
        name=name,
        folder=run.model,
        run_folder=run.folder,
        **vars(cost),
        tokens=run.progress.tokens,
        tokens_per_second=median(speeds[1:] or speeds) if speeds else None,
        memory=memory,
        seconds=losses[-1].seconds if losses else 0.0,
        bits_per_byte=validations[-1]["bits_per_byte"] if validations else None,
        bits={data_set: score["bits_per_byte"] for data_set, score in sets.items()},
        losses=losses,
        validations=[_validation(record, losses) for record in validations],
    )


def _training(records: list[dict[str, Any]]) -> Iterator[Point]:
    """The loss at each record of the training; the time comes from its tokens and their rate."""
    seconds = 0.0
    steps = [{"tokens": 0}, *(record for record in records if record["kind"] == "train")]
    for before, now in pairwise(steps):
        seconds += (now["tokens"] - before["tokens"]) / now["tokens_per_second"]
        yield Point(now["tokens"], seconds, now["loss"])


def _validation(record: dict[str, Any], losses: list[Point]) -> Point:
    """A validation, at the time of the training's record nearest to it."""
    nearest = min(losses, key=lambda point: abs(point.tokens - record["tokens"]), default=Point(0, 0.0, 0.0))
    return Point(record["tokens"], nearest.seconds, record["bits_per_byte"])
