"""The early-exit curve: models scored after each of their layers, by `braid eval --exits`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from braidlm.core.decoding.early_exits import leave_after
from braidlm.core.errors import BraidError
from braidlm.core.report.drawing import load_matplotlib
from braidlm.core.report.rendering import write
from braidlm.core.report.report import Report
from braidlm.evals.evaluate import evaluate, open_to_score
from braidlm.evals.reports.curves import Curves, Point
from braidlm.model.layer_skip import check_exit, exit_layers
from braidlm.opening.braid import OpenedBraid
from braidlm.opening.names import StrPath
from braidlm.opening.opened_model import OpenedModel


@dataclass
class ExitPoint(Point):
    """A model that is left after a layer."""

    layer: int


class ExitCurves(Curves[ExitPoint]):
    """A curve for each model: its scores after each layer."""

    name: ClassVar[str] = "exits"
    x_label: ClassVar[str] = "left after layer"

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
    if out is not None:
        load_matplotlib()
    curves = ExitCurves([])

    def open_exits() -> list[OpenedModel]:
        opened: list[OpenedModel] = []
        for model in open_to_score(models):
            for layer, left_early in _exits(model, layers).items():
                opened.append(left_early)
                curves.points.append(ExitPoint(model.name, left_early.name, layer))
        return opened

    scored = evaluate(open_exits, tasks, out=out, **evaluation)
    curves.score(scored)
    if out is not None:
        write(curves.whole_report(), out, curves.name)
    return curves


def _exits(model: OpenedModel, layers: Sequence[int] | None) -> dict[int, OpenedModel]:
    """The model as it is left after each of these layers."""
    if not isinstance(model, OpenedBraid):
        raise BraidError("only Braid's models can be left after a layer", str(model.folder), "Leave out --exits.")
    body = model.info.model.model
    for layer in layers or ():
        check_exit(body.stages, body.width_out, layer)

    def left_after(layer: int) -> OpenedModel:
        def load(device: Any) -> Any:
            loaded = model.load(device)
            leave_after(loaded, layer)
            return loaded

        return model.changed(f"{model.name}, layer {layer}", f"{model.sha256}, layer {layer}", load)

    return {layer: left_after(layer) for layer in layers or exit_layers(body.stages, body.width_out)}
