"""The points of pruning curves as plain data, for tables, pages and programs."""

from dataclasses import asdict, dataclass, field
from typing import Any

from braidlm.evals.results import Evaluation
from braidlm.studies.pruning.options import PruningOptions


@dataclass
class Point:
    """One model of a curve."""

    curve: str
    model: str
    """Its name among the results."""
    pruned: str
    """In words: `threshold 0.1`, `keep 0.8`, or `as it is`."""
    parameters: int
    share: float
    """Of the parameters of the first model as it is."""
    modules: int
    """How many are left, over all layers."""
    threshold: float | None = None
    keep: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    """By task; other measures of a task are under `task.measure`."""
    standard_errors: dict[str, float | None] = field(default_factory=dict)


@dataclass
class PruningCurves:
    """The points of all curves, and the evaluation that they come from."""

    points: list[Point]
    metrics: dict[str, str]
    """By task, what its score is."""
    options: PruningOptions
    evaluation: Evaluation

    @property
    def curves(self) -> dict[str, list[Point]]:
        """The points of each curve, those with most parameters first."""
        named: dict[str, list[Point]] = {}
        for point in self.points:
            named.setdefault(point.curve, []).append(point)
        return {name: sorted(points, key=lambda point: -point.parameters) for name, points in named.items()}

    def facts(self) -> dict[str, Any]:
        """Plain data, as `pruning.json` holds it."""
        points = [asdict(point) for points in self.curves.values() for point in points]
        return {"format": 1, "options": asdict(self.options), "metrics": self.metrics, "points": points}
