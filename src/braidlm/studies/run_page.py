"""The page that `braid train` leaves in the folder of a run: curves, samples, and what the training cost."""

from pathlib import Path
from typing import Any

from braidlm.core.console import count
from braidlm.core.models.runs import PAGE, read_metrics
from braidlm.core.report.rendering import write
from braidlm.core.report.report import Lines, Report, listed
from braidlm.studies.results import ModelResult, Point, read_run
from braidlm.studies.tables import add_recipes, duration
from braidlm.training.monitoring.speed import TRAINING_FLOPS

SETTLED = 0.01
"""A training whose last validation is better by less than this share than the one before has little left to learn."""


def write_run_page(folder: Path) -> Path:
    """Write the page of a run into its folder, from what the run recorded."""
    return write(run_page(read_run(folder.name, folder)), folder, Path(PAGE).stem)


def run_page(run: ModelResult) -> Report:
    """What a run reaches, how it learned, what it writes and what it cost."""
    about = f"Trained on {listed(list(run.recipe['data']['sets']))}" if "data" in run.recipe else "One training"
    report = Report(run.name, f"{about}, seed {run.seed}", _verdict(run))
    _add_curves(report, run)
    _add_samples(report, run)
    report.heading("What it cost").facts(_costs(run))
    report.text(
        "Training is the time of steps alone; wall clock has validation, samples and saving in it. FLOPs are those of "
        "the model's products, and a backward pass counts as two forward passes."
    )
    report.heading("The recipe")
    add_recipes(report, {run.name: run.recipe})
    return report


def _verdict(run: ModelResult) -> str:
    seen = f"{run.steps:,} steps ({count(run.tokens)} tokens, {count(run.words)} words)"
    stopped = "" if run.is_done else f" The run is {run.state}."
    if not run.curve:
        return f"`{run.name}` was trained for {seen}; no held-out text was scored.{stopped}"
    last, best = run.curve[-1], min(run.curve, key=lambda point: point.value)
    text = f"`{run.name}` has {last.value:.4f} bits per byte on held-out text after {seen}.{stopped}\n\n"
    if len(run.curve) == 1:
        return f"{text}It was scored once, so how it learned is in the training loss alone."
    if best.step != last.step:
        return f"{text}It was better before, {best.value:.4f} at step {best.step:,}: train less, or on more text."
    fell = 1 - last.value / run.curve[-2].value
    more = "little is left to learn at this rate" if fell < SETTLED else "more training would go on lowering it"
    return f"{text}The last validation is the best, {fell:.1%} below the one before: {more}. One seed: another differs."


def _add_curves(report: Report, run: ModelResult) -> None:
    report.heading("How it learned")

    def line(points: list[Point], values: list[float]) -> tuple[list[float], list[float]]:
        return [float(point.tokens) for point in points], values

    sets = list(run.curve[-1].bits) if run.curve else []
    if len(run.curve) > 1:
        lines = {name: line(run.curve, [point.bits[name] for point in run.curve]) for name in sets}
        lines = lines if len(sets) == 1 else {"all text": line(run.curve, [p.value for p in run.curve])} | lines
        chart = Lines(lines, "tokens seen", "bits per byte, held-out text")
        report.chart(chart, "Text that the model does not train on; lower is better.", "bits-per-byte")
    if len(run.losses) > 1:
        losses = {"training loss": line(run.losses, [point.value for point in run.losses])}
        report.chart(Lines(losses, "tokens seen", "nats per token", log_y=True), "The training loss.", "loss")


def _add_samples(report: Report, run: ModelResult) -> None:
    """What the model writes after each prompt, at the first and at the last of its samples."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(run.folder, "sample"):
        by_prompt.setdefault(record["prompt"], []).append(record)
    if by_prompt:
        report.heading("What it writes")
    for prompt, records in by_prompt.items():
        for record in [records[0], *records[1:][-1:]]:
            report.quote(record["text"], f"step {record['step']:,}", prompt)


def _costs(run: ModelResult) -> dict[str, Any]:
    speed, flops = run.tokens_per_second, run.flops_per_token
    known = {
        "parameters": run.parameters,
        "training": duration(run.seconds),
        "wall clock": duration(run.wall_seconds),
        "tokens/s": None if speed is None else f"{speed:,.0f}",
        "FLOPs of the training": None if flops is None else count(float(TRAINING_FLOPS * flops * run.tokens)),
        "hardware": run.hardware,
    }
    return {name: value for name, value in known.items() if value is not None}
