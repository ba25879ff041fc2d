"""The early-exit curve: models scored after each of their layers, by `braid eval --exits`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from braidlm.core.decoding.exits import leave_after
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.folders import load_config
from braidlm.core.models.names import StrPath
from braidlm.core.report.report import Report
from braidlm.core.report.write import check_drawing, write
from braidlm.evals.evaluate import evaluate_opened
from braidlm.evals.model_folders import ModelFolder, open_model_folders
from braidlm.evals.reports.curves import Curves, Point
from braidlm.model.layer_skip import check_exit, exit_layers


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


@dataclass
class ModelExit(ModelFolder):
    """A model folder whose model is left after a layer."""

    layer: int = field(kw_only=True)

    def load(self, device: str) -> Any:
        model = super().load(device)
        leave_after(model, self.layer)
        return model


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
        check_drawing()
    curves = ExitCurves([])

    def open_models() -> list[ModelFolder]:
        opened: list[ModelFolder] = []
        for folder in open_model_folders(models):
            for exit in _exits(folder, layers):
                opened.append(exit)
                curves.points.append(ExitPoint(folder.name, exit.name, exit.layer))
        return opened

    scored = evaluate_opened(open_models, tasks, out=out, **evaluation)
    curves.score(scored)
    if out is not None:
        write(curves.whole_report(), out, curves.name)
    return curves


def _exits(folder: ModelFolder, layers: Sequence[int] | None) -> list[ModelExit]:
    """The model after each of these layers."""
    if not folder.is_braid:
        raise BraidError("only Braid's models can be left after a layer", str(folder.path), "Leave out --exits.")
    body = skeleton(load_config(folder.path)).model
    for layer in layers or ():
        check_exit(body.stages, body.width_out, layer)
    return [
        ModelExit(
            f"{folder.name}, layer {layer}",
            folder.path,
            None,
            folder.tokenizer,
            f"{folder.sha256}, layer {layer}",
            layer=layer,
        )
        for layer in layers or exit_layers(body.stages, body.width_out)
    ]
