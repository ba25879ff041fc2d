"""What a comparison found: what each model costs, how fast it trains and what it reaches, and the report of it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from braidlm.core.console import count
from braidlm.core.differences import shown
from braidlm.core.models.accounting import model_cost, skeleton
from braidlm.core.models.runs import read_metrics
from braidlm.core.report.charts import Lines, Points
from braidlm.core.report.html import notebook
from braidlm.core.report.report import Report, Table
from braidlm.opening.open import open_model
from braidlm.studies.tables import duration
from braidlm.training.train import Run

PAGE, TABLE, RESULTS = "compare", "compare", "results"
"""The names of the files."""
MAX_DIFFERENCES = 60
"""Rows of the table of what differs; models of different shapes differ in more, and the page has both in full."""
TRAINING_FLOPS = 3
"""Forward and backward pass, in forward passes."""


class Point(NamedTuple):
    """A value at one point of a training."""

    tokens: int
    seconds: float
    """Seconds of training alone, without validation and saving."""
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
    """The parameters that take part in computing one token."""
    flops_per_token: int
    """The cost of a forward pass, at the length of the training sequences."""
    tokens: int
    """Seen in training."""
    tokens_per_second: float | None
    """The median of the training's records; the first, in which it warms up, does not count where there are others."""
    memory: int | None
    """The peak of the bytes that the training took; None where it was not measured."""
    seconds: float
    """Seconds of training alone."""
    bits_per_byte: float | None
    """The result of the last validation, over all held-out text; None if there is none."""
    bits: dict[str, float] = field(default_factory=dict)
    """The bits per byte of each data set."""
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
        return notebook(comparison_table(self))


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


def comparison_report(comparison: Comparison, recipes: Mapping[str, dict[str, Any]]) -> Report:
    """The table, the charts, in what the recipes differ, and the recipes in full."""
    report = Report("Comparison", f"{len(comparison.models)} models, trained on the same batches")
    report.data[RESULTS] = comparison.facts()
    report.facts(comparison.settings).heading("Cost, speed and quality").table(comparison_table(comparison))
    report.text(
        "FLOPs are those of a forward pass. Tokens per second are the median of the training's records after the "
        "first; memory is the most that a training took, weights and optimizer included. One seed each: small "
        "differences in bits per byte may be chance."
    )
    _add_charts(report, comparison)
    rows = [
        [key, *("–" if value is None else shown(value) for value in values.values())]
        for key, values in comparison.differences.items()
    ]
    if rows:
        columns = ["key", *(model.name for model in comparison.models)]
        report.heading("In what the recipes differ").table(Table(columns, rows[:MAX_DIFFERENCES]))
    if len(rows) > MAX_DIFFERENCES:
        report.text(f"And {len(rows) - MAX_DIFFERENCES} more keys, in the recipes below.")
    for name, recipe in recipes.items():
        report.code(json.dumps(recipe, indent=2, ensure_ascii=False), summary=f"The recipe of {name}")
    return report.links({"The table as CSV": f"{TABLE}.csv", "Everything for programs": f"{RESULTS}.json"})


def comparison_table(comparison: Comparison) -> Table:
    """A row for each model; the change is against the first. The file has every digit."""
    models, sets = comparison.models, comparison.data_sets if len(comparison.data_sets) > 1 else []
    costs = ["parameters", "active", "FLOPs per token", "tokens/s", "memory", "training"]
    columns = ["model", *costs, *(f"bits per byte, {name}" for name in sets), "bits per byte", "change"]
    first, rows = models[0].bits_per_byte, []
    for model in models:
        bits, speed = model.bits_per_byte, model.tokens_per_second
        is_changed = bits is not None and first is not None and model is not models[0]
        rows.append(
            [
                *(model.name, model.parameters, model.active_parameters, count(float(model.flops_per_token))),
                None if speed is None else f"{speed:,.0f}",
                None if model.memory is None else memory_text(model.memory),
                duration(model.seconds),
                *(f"{model.bits[name]:.4f}" for name in sets),
                None if bits is None else f"{bits:.4f}",
                change(bits / first - 1) if is_changed else None,  # type: ignore[operator]
            ]
        )
    known = [model.bits_per_byte for model in models if model.bits_per_byte is not None]
    best = next((at for at, model in enumerate(models) if known and model.bits_per_byte == min(known)), None)
    sizes = ("parameters", "active_parameters", "flops_per_token")
    keys = ("name", *sizes, "tokens", "tokens_per_second", "memory", "seconds", "bits_per_byte")
    facts = [[*(getattr(model, key) for key in keys), *model.bits.values()] for model in models]
    return Table(columns, rows, name=TABLE, best=best, keep=1, data=Table([*keys, *comparison.data_sets], facts))


def memory_text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def change(share: float) -> str:
    return f"{100 * share:+.1f}%".replace("-", "−")


def _add_charts(report: Report, comparison: Comparison) -> None:
    """The charts that have something to draw."""
    losses = {model.name: model.losses for model in comparison.models if model.losses}
    if losses:
        loss = "training loss, nats per token"
        by_tokens = _lines(losses, lambda _, point: point.tokens, "tokens seen", loss)
        by_time = _lines(losses, lambda _, point: point.seconds, "seconds of training", loss)
        report.chart(by_tokens, "The training loss for the same tokens.", "loss-tokens")
        report.chart(by_time, "The same for the same time; validation and saving do not count.", "loss-time")
    scored = {model.name: model for model in comparison.models if model.bits_per_byte is not None}
    if scored:
        curves = _lines(
            {name: model.validations for name, model in scored.items()},
            lambda name, point: scored[name].training_flops(point.tokens),
            "FLOPs of the training so far",
            "bits per byte, held-out text",
        )
        caption = "Held-out text during the training; a backward pass counts as two forward passes."
        report.chart(curves, caption, "bits-flops")
        ends = {name: (float(m.flops_per_token), m.bits_per_byte or 0.0) for name, m in scored.items()}
        caption = "What each model reaches at the end. Nearer to the lower left is better."
        report.chart(Points(ends, "FLOPs per token", "bits per byte"), caption, "bits-cost")


def _lines(points: Mapping[str, list[Point]], x: Callable[[str, Point], float], x_label: str, y_label: str) -> Lines:
    series = {
        name: ([x(name, point) for point in each], [point.value for point in each]) for name, each in points.items()
    }
    return Lines(series, x_label, y_label, log_y=True)
