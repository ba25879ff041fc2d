"""The files of early-exit curves: exits.html, exits.json, exits.csv, and figures as PNG."""

import csv
import io
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from braidlm.core.files import write_json, write_text
from braidlm.core.report import figures
from braidlm.core.report.page import Page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXIT_PAGE = "exits.html"


@dataclass
class ExitPoint:
    """A model that is left after a layer."""

    curve: str
    """The name of the model."""
    model: str
    """Its name among the results."""
    layer: int
    scores: dict[str, float] = field(default_factory=dict)
    """By task."""
    standard_errors: dict[str, float | None] = field(default_factory=dict)


@dataclass
class ExitCurves:
    """The points of all models."""

    points: list[ExitPoint]
    metrics: dict[str, str]
    """By task, what its score is."""

    def facts(self) -> dict[str, Any]:
        """Plain data, as `exits.json` holds it."""
        return {"format": 1, **asdict(self)}

    @property
    def columns(self) -> list[str]:
        """The heading of `rows`."""
        return ["model", "layer", *self.metrics]

    def rows(self) -> list[list[str]]:
        """A row for each point, for tables that people read."""
        return [[p.curve, str(p.layer), *(_score(p, task) for task in self.metrics)] for p in self.points]

    def figures(self) -> dict[str, "Figure"]:
        """For each task, its score against the layer."""
        return {task: self._figure(task) for task in self.metrics}

    def _figure(self, task: str) -> "Figure":
        series: dict[str, tuple[list[float], list[float]]] = {}
        for point in self.points:
            layers, scores = series.setdefault(point.curve, ([], []))
            layers.append(point.layer)
            scores.append(point.scores[task])
        metric = self.metrics[task]
        return figures.line_chart(
            series, "left after layer", metric if metric.replace(" ", "_") == task else f"{task}: {metric}"
        )


def write_exit_curves(curves: ExitCurves, out: Path) -> None:
    """Write all files beside those of the evaluation."""
    drawn = curves.figures()
    for task, figure in drawn.items():
        figures.save_png(figure, out / f"exits-{task.replace(':', '-').replace('/', '-')}.png")
    write_text(out / "exits.csv", _csv(curves))
    write_json(out / "exits.json", curves.facts())
    _page(curves, drawn).write(out / EXIT_PAGE)


def _score(point: ExitPoint, task: str) -> str:
    error = point.standard_errors[task]
    return f"{point.scores[task]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _csv(curves: ExitCurves) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(curves.columns)
    for point in curves.points:
        writer.writerow([point.curve, point.layer, *(f"{point.scores[task]:.6g}" for task in curves.metrics)])
    return text.getvalue()


def _page(curves: ExitCurves, drawn: dict[str, "Figure"]) -> Page:
    names = ", ".join(dict.fromkeys(point.curve for point in curves.points))
    page = Page("Quality against the layer that a model is left after", names)
    for figure in drawn.values():
        page.figure(figures.to_svg(figure))
    page.heading("Every layer")
    page.table(curves.columns, curves.rows())
    page.text(
        "At each point the last norm and the head read the stream after that layer, and later layers are not run. "
        "`braid generate --exit-layer N` writes text in this way; with `--speculate` such a layer drafts, and the text "
        "is the whole model's."
    )
    page.links({"All scores": "results.html", "The points as CSV": "exits.csv"})
    return page
