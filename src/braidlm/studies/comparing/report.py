"""The table, the figures and the page of a comparison."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from braidlm.core.console import count
from braidlm.core.console import duration as rough_duration
from braidlm.core.differences import shown
from braidlm.core.files import write_json, write_text
from braidlm.core.report import figures
from braidlm.core.report.page import Page
from braidlm.core.report.table import csv_text
from braidlm.studies.comparing.results import ComparedModel, Comparison, Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, TABLE, RESULTS = "compare.html", "compare.csv", "results.json"
MAX_DIFFERENCES = 60
"""Rows of the table of what differs; models of different shapes differ in more, and the page has both in full."""


def write_comparison(comparison: Comparison, recipes: Mapping[str, dict[str, Any]]) -> None:
    """Write all files into the folder of the comparison; its recipes are shown in full."""
    drawn = comparison_figures(comparison)
    for name, (figure, _) in drawn.items():
        figures.save_png(figure, comparison.folder / f"{name}.png")
    write_json(comparison.folder / RESULTS, comparison.facts())
    write_text(comparison.folder / TABLE, comparison_csv(comparison))
    comparison_page(comparison, drawn, recipes).write(comparison.folder / PAGE)


def comparison_columns(comparison: Comparison) -> list[str]:
    """The heading of `comparison_rows`."""
    several = [f"bits per byte, {name}" for name in comparison.data_sets] if len(comparison.data_sets) > 1 else []
    costs = ["parameters", "active", "FLOPs per token", "tokens/s", "memory", "training"]
    return ["model", *costs, *several, "bits per byte", "change"]


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """A row for each model, for people; the change is against the first."""
    first, rows = comparison.models[0].bits_per_byte, []
    for model in comparison.models:
        bits = model.bits_per_byte
        rows.append(
            [
                model.name,
                f"{model.parameters:,}",
                f"{model.active_parameters:,}",
                count(float(model.flops_per_token)),
                "–" if model.tokens_per_second is None else f"{model.tokens_per_second:,.0f}",
                "–" if model.memory is None else memory_text(model.memory),
                duration(model.seconds),
                *(f"{bit:.4f}" for bit in (model.bits.values() if len(comparison.data_sets) > 1 else ())),
                "–" if bits is None else f"{bits:.4f}",
                "–" if bits is None or first is None or model is comparison.models[0] else change(bits / first - 1),
            ]
        )
    return rows


def memory_text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """With a decimal where it is short."""
    return f"{seconds:.1f}s" if seconds < 60 else rough_duration(seconds)


def change(share: float) -> str:
    return f"{100 * share:+.1f}%".replace("-", "−")


def comparison_csv(comparison: Comparison) -> str:
    """Comma-separated values with every digit."""
    sizes = ("parameters", "active_parameters", "flops_per_token")
    keys = ("name", *sizes, "tokens", "tokens_per_second", "memory", "seconds", "bits_per_byte")
    rows = [[*(getattr(model, key) for key in keys), *model.bits.values()] for model in comparison.models]
    return csv_text([*keys, *comparison.data_sets], rows)


def comparison_figures(comparison: Comparison) -> dict[str, tuple["Figure", str]]:
    """Figures that have something to draw, by the name of their file, each with its caption."""
    drawn: dict[str, tuple[Figure, str]] = {}
    losses = {model.name: model.losses for model in comparison.models if model.losses}
    if losses:
        drawn["loss-tokens"] = (
            _lines(losses, lambda _, point: point.tokens, "tokens seen", "training loss, nats per token"),
            "The training loss for the same tokens.",
        )
        drawn["loss-time"] = (
            _lines(losses, lambda _, point: point.seconds, "seconds of training", "training loss, nats per token"),
            "The same for the same time; validation and saving do not count.",
        )
    scored = [model for model in comparison.models if model.bits_per_byte is not None]
    if scored:
        flops = {model.name: model.training_flops for model in scored}
        drawn["bits-flops"] = (
            _lines(
                {model.name: model.validations for model in scored},
                lambda name, point: flops[name](point.tokens),
                "FLOPs of the training so far",
                "bits per byte, held-out text",
            ),
            "Held-out text during the training; a backward pass counts as two forward passes.",
        )
        drawn["bits-cost"] = (
            figures.point_chart({m.name: _cost_and_bits(m) for m in scored}, "FLOPs per token", "bits per byte"),
            "What each model reaches at the end. Nearer to the lower left is better.",
        )
    return drawn


def _cost_and_bits(model: ComparedModel) -> tuple[float, float]:
    assert model.bits_per_byte is not None
    return float(model.flops_per_token), model.bits_per_byte


def _lines(points: Mapping[str, list[Point]], x: Callable[[str, Point], float], x_label: str, y_label: str) -> "Figure":
    series = {
        name: ([x(name, point) for point in each], [point.value for point in each]) for name, each in points.items()
    }
    return figures.line_chart(series, x_label, y_label, log_y=True)


def comparison_page(
    comparison: Comparison, drawn: Mapping[str, tuple["Figure", str]], recipes: Mapping[str, dict[str, Any]]
) -> Page:
    """The table, the figures, and in what the recipes differ."""
    page = Page("Comparison", f"{len(comparison.models)} models, trained on the same batches")
    page.facts(comparison.settings)
    page.heading("Cost, speed and quality")
    scores = [model.bits_per_byte for model in comparison.models]
    known = [score for score in scores if score is not None]
    best = scores.index(min(known)) if known else None
    page.table(comparison_columns(comparison), comparison_rows(comparison), best=best)
    page.text(
        "FLOPs are those of a forward pass. Tokens per second are the median of the training's records after the "
        "first; memory is the most that a training took, weights and optimizer included. One seed each: small "
        "differences in bits per byte may be chance."
    )
    for figure, caption in drawn.values():
        page.figure(figures.to_svg(figure), caption)
    _show_differences(page, comparison)
    for name, recipe in recipes.items():
        page.code(json.dumps(recipe, indent=2, ensure_ascii=False), summary=f"The recipe of {name}")
    page.links({"The table as CSV": TABLE, "Everything for programs": RESULTS})
    return page


def _show_differences(page: Page, comparison: Comparison) -> None:
    rows = [
        [key, *("–" if value is None else shown(value) for value in values.values())]
        for key, values in comparison.differences.items()
    ]
    if not rows:
        return
    page.heading("In what the recipes differ")
    page.table(["key", *(model.name for model in comparison.models)], rows[:MAX_DIFFERENCES])
    if len(rows) > MAX_DIFFERENCES:
        page.text(f"And {len(rows) - MAX_DIFFERENCES} more keys, in the recipes below.")
