"""Curves: the scores of models along an axis, such as the layer that a model is left after, or its size."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from braidlm.core.report.report import Lines, Report, Table
from braidlm.evals.results import Evaluation


@dataclass
class Point:
    """One model of a curve."""

    curve: str
    model: str
    """The name of the model among the results."""
    scores: dict[str, float] = field(default_factory=dict, kw_only=True)
    """By task; other measures of a task are under `task.measure`."""
    standard_errors: dict[str, float | None] = field(default_factory=dict, kw_only=True)


P = TypeVar("P", bound=Point)


@dataclass
class Curves(ABC, Generic[P]):
    """The points of all curves."""

    points: list[P]
    metrics: dict[str, str] = field(default_factory=dict, kw_only=True)
    """What the score of each task is."""
    name: ClassVar[str]
    """The name of the files."""
    x_label: ClassVar[str]

    @abstractmethod
    def x(self, point: P) -> float:
        """Where a point is drawn."""

    @abstractmethod
    def cells(self, point: P) -> dict[str, Any]:
        """The columns before the scores, for people."""

    @abstractmethod
    def data(self, point: P) -> dict[str, Any]:
        """The columns before the scores, for programs."""

    def score(self, evaluation: Evaluation) -> None:
        """Give every point the scores of its model."""
        for point in self.points:
            for task, result in evaluation.of(point.model).tasks.items():
                point.scores |= {task: result.score, **{f"{task}.{name}": value for name, value in result.also.items()}}
                point.standard_errors[task] = result.standard_error
        self.metrics = {task: result.metric for task, result in evaluation.models[0].tasks.items()}

    @property
    def curves(self) -> dict[str, list[P]]:
        """The points of each curve."""
        named: dict[str, list[P]] = {}
        for point in self.points:
            named.setdefault(point.curve, []).append(point)
        return named

    def facts(self) -> dict[str, Any]:
        """Plain data, as the JSON file holds it."""
        points = [asdict(point) for points in self.curves.values() for point in points]
        return {"format": 1, "metrics": self.metrics, "points": points}

    def table(self) -> Table:
        """A row for each point."""
        ordered = [point for points in self.curves.values() for point in points]
        rows = []
        for point in ordered:
            errors = [point.standard_errors[task] for task in self.metrics]
            known = ["" if error is None else f" ± {error:.4f}" for error in errors]
            scores = [f"{point.scores[task]:.4f}{error}" for task, error in zip(self.metrics, known, strict=True)]
            rows.append([*self.cells(point).values(), *scores])
        return Table([*self.cells(ordered[0]), *self.metrics], rows, keep=2)

    def report(self, title: str, subtitle: str) -> Report:
        """A report with a chart for each task, and the points for programs."""
        report = Report(title, subtitle, data={self.name: self.facts()}, tables=[self._data_table()])
        for task, metric in self.metrics.items():
            label = metric if metric.replace(" ", "_") == task else f"{task}: {metric}"
            lines = {n: ([self.x(p) for p in ps], [p.scores[task] for p in ps]) for n, ps in self.curves.items()}
            # Names stand at the right, where the last point of a curve is.
            falling = any(xs[0] > xs[-1] for xs, _ in lines.values())
            name = f"{self.name}-{task.replace(':', '-').replace('/', '-')}"
            report.chart(Lines(lines, self.x_label, label, falling_x=falling), name=name)
        return report

    def add_points(self, report: Report, heading: str, text: str) -> Report:
        """The table, what it means, and where the rest is."""
        report.heading(heading).table(self.table()).text(text)
        return report.links({"All scores": "results.html", "The points as CSV": f"{self.name}.csv"})

    def _data_table(self) -> Table:
        measures = list(dict.fromkeys(name for point in self.points for name in point.scores))
        ordered = [point for points in self.curves.values() for point in points]
        scores = [[p.scores.get(name) for name in measures] for p in ordered]
        shown = [[None if score is None else f"{score:.6g}" for score in row] for row in scores]
        rows = [[*self.data(p).values(), *row] for p, row in zip(ordered, shown, strict=True)]
        return Table([*self.data(ordered[0]), *measures], rows, name=self.name)
