"""The files of pruning curves: pruning.html, pruning.json, pruning.csv, and figures as PNG."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from braidlm.core.files import write_json, write_text
from braidlm.core.report import figures
from braidlm.core.report.page import Page
from braidlm.studies.pruning.points import Point, PruningCurves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "pruning.html"


def write_curves(curves: PruningCurves, out: Path) -> None:
    """Write all files beside those of the evaluation."""
    drawn = curve_figures(curves)
    for name, figure in drawn.items():
        figures.save_png(figure, out / f"pruning-{name}.png")
    write_text(out / "pruning.csv", curve_table(curves))
    write_json(out / "pruning.json", curves.facts())
    curve_page(curves, drawn).write(out / PAGE)


def curve_figures(curves: PruningCurves) -> dict[str, "Figure"]:
    """A figure for each task, and one of what thresholds leave, if there are thresholds."""
    drawn = {task.replace(":", "-").replace("/", "-"): _task_figure(curves, task) for task in curves.metrics}
    thresholds = {
        name: [(point.threshold, 100 * point.share) for point in points if point.threshold is not None]
        for name, points in curves.curves.items()
    }
    series = {name: tuple(zip(*sorted(pairs), strict=True)) for name, pairs in thresholds.items() if len(pairs) > 1}
    if series:
        drawn["thresholds"] = figures.line_chart(series, "threshold", "remaining parameters (%)")  # type: ignore[arg-type]
    return drawn


def _task_figure(curves: PruningCurves, task: str) -> "Figure":
    series = {
        name: ([100 * point.share for point in points], [point.scores[task] for point in points])
        for name, points in curves.curves.items()
    }
    metric = curves.metrics[task]
    label = metric if metric.replace(" ", "_") == task else f"{task}: {metric}"
    figure = figures.line_chart(series, "remaining parameters (%)", label)
    figure.axes[0].invert_xaxis()  # names stand at the right, where the smallest models differ most
    return figure


def curve_rows(curves: PruningCurves) -> list[list[str]]:
    """A row for each point, for tables that people read."""
    rows = []
    for points in curves.curves.values():
        for point in points:
            size = [f"{point.parameters:,}", f"{point.share:.1%}", f"{point.modules:,}"]
            rows.append([point.curve, point.pruned, *size, *(_score(point, task) for task in curves.metrics)])
    return rows


def curve_columns(curves: PruningCurves) -> list[str]:
    """The heading of `curve_rows`."""
    return ["curve", "pruned", "parameters", "remaining", "modules", *curves.metrics]


def _score(point: Point, task: str) -> str:
    error = point.standard_errors[task]
    return f"{point.scores[task]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def curve_table(curves: PruningCurves) -> str:
    """Comma-separated values: a row for each point, a column for each measure of each task."""
    measures = list(dict.fromkeys(name for point in curves.points for name in point.scores))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["curve", "model", "pruned", "threshold", "keep", "parameters", "share", "modules", *measures])
    for points in curves.curves.values():
        for p in points:
            size = [p.parameters, f"{p.share:.6g}", p.modules]
            scores = [f"{p.scores[name]:.6g}" if name in p.scores else None for name in measures]
            writer.writerow([p.curve, p.model, p.pruned, p.threshold, p.keep, *size, *scores])
    return text.getvalue()


def curve_page(curves: PruningCurves, drawn: dict[str, "Figure"]) -> Page:
    """The figures, the table and how they were made."""
    page = Page("Quality against remaining parameters", f"{', '.join(curves.curves)}, pruned to several sizes")
    for name, figure in drawn.items():
        if name == "thresholds":
            page.heading("What a threshold leaves")
        page.figure(figures.to_svg(figure))
    page.heading("Every point")
    page.table(curve_columns(curves), curve_rows(curves))
    page.text(
        f"The use of every module was measured on {curves.options.tokens:,} tokens of `{curves.options.text}` at most. "
        "At each point the least used modules are left out, in memory, and the rest is scored without more training; "
        "curves beside are of models that were pruned before. Remaining parameters are shares of those of the first "
        "model. `braid edit prune` with the same options writes the model of a point."
    )
    page.links({"All scores": "results.html", "The points as CSV": "pruning.csv"})
    return page
