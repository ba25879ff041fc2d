"""Curves: the scores of models along an axis, such as their size, or the layer that a model is left after.

The second is the early-exit curve of `braid eval --exits`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from braidlm.core.decoding.early_exits import leave_after
from braidlm.core.errors import BraidError
from braidlm.core.report.rendering import write
from braidlm.core.report.report import Lines, Report, Table
from braidlm.core.report.verdicts import EQUAL
from braidlm.evals.evaluate import evaluate, open_to_score
from braidlm.evals.results import Evaluation
from braidlm.model.layer_skip import check_exit, exit_layers
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.names import StrPath
from braidlm.opening.opened_model import OpenedModel


@dataclass
class Point:
    curve: str
    model: str
    """The name of the model among the results."""
    scores: dict[str, float] = field(default_factory=dict, kw_only=True)
    """By task; other measures of a task are under `task.measure`."""
    standard_errors: dict[str, float | None] = field(default_factory=dict, kw_only=True)


P = TypeVar("P", bound=Point)


@dataclass
class Curves(ABC, Generic[P]):
    points: list[P]
    metrics: dict[str, str] = field(default_factory=dict, kw_only=True)
    """What the score of each task is."""
    name: ClassVar[str]
    """The name of the files."""
    x_label: ClassVar[str]
    place: ClassVar[str]
    """Where a point is, in words: a format of its x."""

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
        named: dict[str, list[P]] = {}
        for point in self.points:
            named.setdefault(point.curve, []).append(point)
        return named

    def facts(self) -> dict[str, Any]:
        """Plain data, as the JSON file holds it."""
        points = [asdict(point) for points in self.curves.values() for point in points]
        return {"format": 1, "metrics": self.metrics, "points": points}

    def table(self) -> Table:
        ordered = [point for points in self.curves.values() for point in points]
        rows = [[*self.cells(p).values(), *(self._score(p, task) for task in self.metrics)] for p in ordered]
        return Table([*self.cells(ordered[0]), *self.metrics], rows, keep=2)

    def report(self, title: str, subtitle: str) -> Report:
        """A report with a chart for each task, and the points for programs."""
        report = Report(title, subtitle, self.verdict(), data={self.name: self.facts()}, tables=[self._data_table()])
        for task, metric in self.metrics.items():
            label = metric if metric.replace(" ", "_") == task else f"{task}: {metric}"
            lines = {n: ([self.x(p) for p in ps], [p.scores[task] for p in ps]) for n, ps in self.curves.items()}
            # Names stand at the right, where the last point of a curve is.
            falling = any(xs[0] > xs[-1] for xs, _ in lines.values())
            name = f"{self.name}-{task.replace(':', '-').replace('/', '-')}"
            report.chart(Lines(lines, self.x_label, label, falling_x=falling), name=name)
        return report

    def verdict(self) -> str:
        """How far along each curve the first task's score stays, and what the other end has."""
        task, said = next(iter(self.metrics)), []
        for name, points in self.curves.items():
            whole, *others = sorted(points, key=self.x, reverse=True)
            if not others:
                continue
            kept = whole
            for point in others:
                if abs(point.scores[task] - whole.scores[task]) > EQUAL * abs(whole.scores[task]):
                    break
                kept = point
            at = [f"{self._score(p, task)} ({self.place.format(self.x(p))})" for p in (whole, kept, others[-1])]
            until = f"it stays within {EQUAL:.0%} until {at[1]}, and the end has {at[2]}"
            if kept is whole:
                until = f"no other point is within {EQUAL:.0%} of that, and the end has {at[2]}"
            elif kept is others[-1]:
                until = f"it stays within {EQUAL:.0%} to the end, {at[2]}"
            said.append(f"{name} has {task} {at[0]}; {until}.")
        errors = any(point.standard_errors[task] for point in self.points)
        sure = "± is one standard error over the items of the task" if errors else "one text, one seed"
        return "\n\n".join([*said, f"How sure: {sure}; nothing was trained again."]) if said else ""

    def _score(self, point: P, task: str) -> str:
        error = point.standard_errors[task]
        return f"{point.scores[task]:.4f}" + ("" if error is None else f" ± {error:.4f}")

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


@dataclass
class ExitPoint(Point):
    """A model that is left after a layer."""

    layer: int


class ExitCurves(Curves[ExitPoint]):
    """A curve for each model: its scores after each layer."""

    name, x_label, place = "exits", "left after layer", "left after layer {:.4g}"

    def x(self, point: ExitPoint) -> float:
        return point.layer

    def cells(self, point: ExitPoint) -> dict[str, Any]:
        return {"model": point.curve, "layer": point.layer}

    data = cells

    def whole_report(self) -> Report:
        """The charts, the table and how they were made."""
        report = self.report("Quality against the layer that a model is left after", ", ".join(self.curves))
        return self.add_points(
            report,
            "Every layer",
            "At each point the last norm and the head read the stream after that layer, and later layers are not run. "
            "`braid generate --exit-layer N` writes text in this way; with `--speculate` such a layer drafts, and the "
            "text is the whole model's.",
        )


def exit_curve(
    models: StrPath | Sequence[StrPath],
    tasks: str | Sequence[str],
    layers: Sequence[int] | None = None,
    *,
    out: StrPath | None = None,
    **evaluation: Any,
) -> ExitCurves:
    """Score models on tasks after each of these layers, by default after every layer that they can be left after.

    `out` is a folder for the results of `braid eval` and for the curves; `evaluation` are options of `braid.eval`.
    """
    curves = ExitCurves([])

    def open_exits() -> list[OpenedModel]:
        opened: list[OpenedModel] = []
        for model in open_to_score(models):
            if not isinstance(model, OpenedBraid):
                where = str(model.folder)
                raise BraidError("only Braid's models can be left after a layer", where, "Leave out --exits.")
            body = model.info.model.model
            for layer in layers or ():
                check_exit(body.stages, body.width_out, layer)
            for layer in layers or exit_layers(body.stages, body.width_out):
                opened.append(_left_after(model, layer))
                curves.points.append(ExitPoint(model.name, opened[-1].name, layer))
        return opened

    curves.score(evaluate(open_exits, tasks, out=out, **evaluation))
    if out is not None:
        write(curves.whole_report(), out, curves.name)
    return curves


def _left_after(model: OpenedModel, layer: int) -> OpenedModel:
    def load(device: Any) -> Any:
        loaded = model.load(device)
        leave_after(loaded, layer)
        return loaded

    return model.changed(f"{model.name}, layer {layer}", f"{model.sha256}, layer {layer}", load)
