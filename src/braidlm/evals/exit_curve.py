"""The early-exit curve: models scored after each of their layers, by `braid eval --exits`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidlm.core.decoding.exits import leave_after
from braidlm.core.errors import BraidError
from braidlm.core.models.accounting import skeleton
from braidlm.core.models.folders import load_config
from braidlm.core.models.names import StrPath
from braidlm.core.report import figures
from braidlm.evals.evaluate import evaluate_opened
from braidlm.evals.model_folders import ModelFolder, open_model_folders
from braidlm.evals.reports.exit_curve import ExitCurves, ExitPoint, write_exit_curves
from braidlm.model.layer_skip import check_exit, exit_layers


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
        figures.check_drawing()
    points: list[ExitPoint] = []

    def open_models() -> list[ModelFolder]:
        opened: list[ModelFolder] = []
        for folder in open_model_folders(models):
            for exit in _exits(folder, layers):
                opened.append(exit)
                points.append(ExitPoint(folder.name, exit.name, exit.layer))
        return opened

    scored = evaluate_opened(open_models, tasks, out=out, **evaluation)
    for point in points:
        for task, result in scored.of(point.model).tasks.items():
            point.scores[task], point.standard_errors[task] = result.score, result.standard_error
    metrics = {task: result.metric for task, result in scored.models[0].tasks.items()}
    curves = ExitCurves(points, metrics)
    if out is not None:
        write_exit_curves(curves, Path(out))
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
