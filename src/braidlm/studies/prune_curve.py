"""The curve of quality against remaining parameters (ModuleFormer, Figures 2 to 4).

Every model is calibrated once; for each point it is pruned in memory and scored on the tasks of `braid eval`. Scores
and the measured use are kept in the folder of the results, so that an interrupted curve goes on where it stopped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from braidlm.bridges.model_info import ModelInfo
from braidlm.core import console
from braidlm.core.errors import BraidError
from braidlm.core.files import json_sha256, write_json
from braidlm.core.models.accounting import skeleton
from braidlm.core.reading import read_json
from braidlm.core.report.rendering import write
from braidlm.core.report.report import Lines, Report
from braidlm.edits.criteria import PruningOptions
from braidlm.edits.edit import SOURCE, EditPlan, assemble
from braidlm.edits.modules import Usage, all_modules, calibration_texts, layers_of, measure_usage, modules_of
from braidlm.edits.prune import Prune
from braidlm.evals.curves import Curves, Point
from braidlm.evals.evaluate import evaluate, open_to_score
from braidlm.evals.results import CACHE
from braidlm.model.config.braid_config import BraidConfig
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.names import StrPath
from braidlm.opening.open import open_model
from braidlm.opening.opened_model import OpenedModel

WHOLE = "as it is"


@dataclass
class PrunedPoint(Point):
    """One model of a curve, whole or pruned."""

    pruned: str
    """In words: `threshold 0.1`, `keep 0.8`, or `as it is`."""
    parameters: int
    share: float
    """The parameters as a share of the parameters of the first model as it is."""
    modules: int
    threshold: float | None = None
    keep: float | None = None


@dataclass
class PruningCurves(Curves[PrunedPoint]):
    """The points of all curves, those with most parameters first."""

    options: PruningOptions
    name: ClassVar[str] = "pruning"
    x_label: ClassVar[str] = "remaining parameters (%)"
    place: ClassVar[str] = "with {:.4g}% of the parameters"

    @property
    def curves(self) -> dict[str, list[PrunedPoint]]:
        return {name: sorted(points, key=lambda point: -point.parameters) for name, points in super().curves.items()}

    def x(self, point: PrunedPoint) -> float:
        return 100 * point.share

    def cells(self, point: PrunedPoint) -> dict[str, Any]:
        size = {"parameters": f"{point.parameters:,}", "remaining": f"{point.share:.1%}", "modules": point.modules}
        return {"curve": point.curve, "pruned": point.pruned, **size}

    def data(self, point: PrunedPoint) -> dict[str, Any]:
        columns = ("curve", "model", "pruned", "threshold", "keep", "parameters", "share", "modules")
        return {name: getattr(point, name) for name in columns} | {"share": f"{point.share:.6g}"}

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"options": asdict(self.options)}

    def whole_report(self) -> Report:
        """The charts, the table and how they were made."""
        subtitle = f"{', '.join(self.curves)}, pruned to several sizes"
        report = self.report("Quality against remaining parameters", subtitle)
        lines = {}
        for name, points in self.curves.items():
            left = sorted((p.threshold, 100 * p.share) for p in points if p.threshold is not None)
            if len(left) > 1:
                lines[name] = [threshold for threshold, _ in left], [share for _, share in left]
        if lines:
            chart = Lines(lines, "threshold", self.x_label)
            report.heading("What a threshold leaves").chart(chart, name="pruning-thresholds")
        return self.add_points(
            report,
            "Every point",
            f"The use of every module was measured on {self.options.tokens:,} tokens of `{self.options.text}` at most. "
            "At each point the least used modules are left out, in memory, and the rest is scored without more "
            "training; curves beside are of models that were pruned before. Remaining parameters are shares of those "
            "of the first model. `braid edit prune` with the same options writes the model of a point.",
        )


def prune_curve(
    models: StrPath | Sequence[StrPath],
    tasks: str | Sequence[str],
    options: PruningOptions,
    *,
    out: StrPath | None = None,
    **evaluation: Any,
) -> PruningCurves:
    """Prune models by the use of their modules on `options.text`, to several sizes, and score each on the tasks.

    `out` is a folder for the results of `braid eval` and for the curves; `evaluation` are options of `braid.eval`.
    """
    series = options.series()
    curves = PruningCurves([], options)

    def open_points() -> list[OpenedModel]:
        opened = list(_pruned_models(models, options, None if out is None else Path(out)))
        for curve, names in series.items():
            for model in open_to_score(names):
                model.name = f"{curve}, {model.name}"
                opened.append((model, _point(curve, model.name, WHOLE, open_model(model.folder, "braid").config)))
        size = opened[0][1].parameters
        for _, point in opened:
            point.share = point.parameters / size
            curves.points.append(point)
        return list({folder.name: folder for folder, _ in opened}.values())

    scored = evaluate(open_points, tasks, out=out, **evaluation)
    curves.score(scored)
    if out is not None:
        write(curves.whole_report(), out, curves.name)
    return curves


def _pruned_models(
    models: StrPath | Sequence[StrPath], options: PruningOptions, out: Path | None
) -> Iterator[tuple[OpenedModel, PrunedPoint]]:
    """Every model as it is and at every point of its curves."""
    curves = [(criterion, by) for criterion in options.criterion for by in options.normalise]
    for source in open_to_score(models):
        if not isinstance(source, OpenedBraid):
            raise BraidError("only Braid's models have modules that can be pruned", str(source.folder))
        source.check_editable()
        all_modules(source)
        texts = calibration_texts(source, options.text, options.tokens)
        for criterion, by in curves:
            several = (f"{criterion}, {by}" if len(options.normalise) > 1 else criterion) if len(curves) > 1 else ""
            curve = ", ".join(filter(None, (source.name, several)))
            yield source, _point(curve, source.name, WHOLE, source.config)
            usage = _usage(source, texts, criterion, out)
            for point in options.points:
                prune = Prune(options.text, **point, criterion=criterion, normalise=by, tokens=options.tokens)  # type: ignore[arg-type]
                ((kind, value),) = point.items()
                words = f"{kind} {value:g}"
                try:
                    plan = prune.plan_for(source, texts, usage)
                except BraidError as error:
                    raise BraidError(error.what, error.where or f"{curve}, {words}", error.todo) from error
                pruned = _pruned(source, f"{curve}, {words}", plan)
                yield pruned, _point(curve, pruned.name, words, plan.model.config, **point)


def _pruned(source: OpenedBraid, name: str, plan: EditPlan) -> OpenedModel:
    """The model without some modules; two points that leave out the same modules have one hash, and are scored once."""

    def load(device: Any) -> Any:
        empty = skeleton(plan.model.config)  # the plan's own stays empty: all plans are kept until the end
        return assemble(empty, plan.account, {SOURCE: source}, seed=1).to(device)

    known = {"of": source.sha256, "architecture": plan.model.config.architecture}
    return source.changed(name, json_sha256(known), load)


def _point(curve: str, model: str, pruned: str, config: BraidConfig, **options: Any) -> PrunedPoint:
    info = ModelInfo(config)
    modules = sum(len(one.names) for layer in layers_of(info) for one in modules_of(layer))
    return PrunedPoint(curve, model, pruned, info.parameters, 1.0, modules, **options)


def _usage(source: OpenedBraid, texts: list[Sequence[int]], criterion: Any, out: Path | None) -> Usage:
    """The use of a model's modules on texts; a measurement from before is read from the folder of the results."""
    known = {"model": source.sha256, "texts": [list(text) for text in texts], "criterion": criterion}
    path = None if out is None else out / CACHE / f"usage-{json_sha256(known)[:24]}.json"
    if path is not None and path.is_file():
        try:
            return {address: torch.tensor(used, dtype=torch.float64) for address, used in read_json(path).items()}
        except (BraidError, TypeError, ValueError, AttributeError):
            console.warn(f"{path} is damaged, and is measured again")
    usage = measure_usage(source.load(), all_modules(source), texts, criterion)
    if path is not None:
        write_json(path, {address: used.tolist() for address, used in usage.items()})
    return usage
