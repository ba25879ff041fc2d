"""`braid compare --text`: models of any kind, trained, edited or given, by size, speed and how they predict a text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from braidlm.core import console
from braidlm.core.devices import choose_device, device_name
from braidlm.core.errors import BraidError
from braidlm.core.files import locked_folder
from braidlm.core.report.page import notebook
from braidlm.core.report.rendering import check_out, write
from braidlm.core.report.report import Points, Report, Table, listed
from braidlm.edits.matrices import FORWARD, STEPS, speeds
from braidlm.evals.evaluate import evaluate, open_to_score
from braidlm.evals.evaluated_model import Settings
from braidlm.evals.reports.scores import verdict
from braidlm.evals.results import Evaluation
from braidlm.opening.names import Names, StrPath
from braidlm.opening.opened_model import OpenedModel
from braidlm.studies.show import folder_facts

NAME = "models"
SCORES = "scores"
"""The folder, in that of the comparison, of the scores and their page."""
TASK = "bits_per_byte"


@dataclass(frozen=True)
class MeasuredModel:
    """What a model costs and how well it predicts a text."""

    name: str
    folder: str
    bits_per_byte: float
    standard_error: float | None
    disk_bytes: int
    """The bytes of all files of weights, the base of an adapter included."""
    parameters: int
    active_parameters: int
    flops_per_token: int
    reading: float
    """Tokens per second of a sequence that is read at once."""
    writing: float
    """Tokens per second one after another, each after all before it."""


@dataclass(frozen=True)
class ComparedModels:
    """Models beside each other."""

    models: Sequence[MeasuredModel]
    evaluation: Evaluation
    text: str
    device: str

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        return {"text": self.text, "device": self.device, "models": [asdict(model) for model in self.models]}

    def _repr_html_(self) -> str:
        return notebook(models_table(self.models))


def compare_models(
    models: Names, text: StrPath, out: StrPath, max_bytes: int | None = None, device: str | None = None
) -> ComparedModels:
    """Measure models (folders, runs, models of studies, decoders) and write one table and a page into `out`.

    `text` is what bits per byte are of, cut after `max_bytes`, as for `braid eval`.
    """
    check_out(out, "braid compare", SCORES, f"{NAME}.html")
    chosen = choose_device(device or "auto")
    opened = open_to_score(models)
    if len(opened) < 2:
        raise BraidError("a comparison needs at least two models", todo="`braid eval` scores one, `braid show` counts.")
    with locked_folder(Path(out), "compare", "--out"):
        evaluation = evaluate(
            lambda: opened,
            TASK,
            data_of={TASK: text},
            settings=Settings(max_bytes=max_bytes),
            out=Path(out) / SCORES,
            device=chosen,
        )
        measured = [
            _measured(model, one.tasks[TASK], chosen) for model, one in zip(opened, evaluation.models, strict=True)
        ]
    compared = ComparedModels(measured, evaluation, str(text), device_name(torch.device(chosen)))
    write(models_report(compared), out, NAME)
    return compared


def _measured(model: OpenedModel, score: Any, device: str) -> MeasuredModel:
    costs = folder_facts(model)
    console.say(f"speed of {model.name}")
    loaded = {model.name: model.load(device)}
    length, steps = (min(most, model.limit or most) for most in (FORWARD, STEPS))
    return MeasuredModel(
        model.name,
        str(model.folder),
        score.score,
        score.standard_error,
        model.disk_bytes,
        costs["parameters"],
        costs["active_parameters"],
        costs["flops_per_token"],
        reading=speeds(loaded, length, 1)[model.name],
        writing=speeds(loaded, 1, steps)[model.name],
    )


def models_table(models: Sequence[MeasuredModel]) -> Table:
    """A row for each model; the file has every digit."""
    rows, sparse = [], any(one.active_parameters != one.parameters for one in models)
    for one in models:
        error = "" if one.standard_error is None else f" ± {one.standard_error:.4f}"
        sizes = [megabytes(one.disk_bytes), one.parameters, *[one.active_parameters] * sparse]
        speed = f"{one.reading:,.0f}", f"{one.writing:,.0f}"
        rows.append([one.name, f"{one.bits_per_byte:.4f}{error}", *sizes, *speed])
    columns = ["model", "bits per byte", "on disk", "parameters", *["active"] * sparse]
    facts = [asdict(one) for one in models]
    return Table(
        [*columns, "reading", "writing"],
        rows,
        name=NAME,
        title="Bits per byte, size, and tokens per second of reading and writing",
        groups=[("", len(columns)), ("tokens/s", 2)],
        keep=1,
        best=min(range(len(models)), key=lambda at: models[at].bits_per_byte),
        data=Table(list(facts[0]), [list(one.values()) for one in facts]),
    )


def megabytes(size: int) -> str:
    """The size of files, as file managers show it."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB" if size < 1e7 else f"{size / 1e6:.0f} MB"


def models_report(compared: ComparedModels) -> Report:
    """The verdict, the table, and size and speed against quality."""
    models = compared.models
    report = Report("Models compared", f"{listed([one.name for one in models])} on {compared.text}")
    frontier = not_surpassed({one.name: (one.disk_bytes, one.bits_per_byte) for one in models})
    no_other = "no other model is both smaller on disk and better"
    report.verdict = f"{verdict(compared.evaluation)}\n\nSize against quality: {listed(frontier)}; {no_other}."
    report.data[NAME] = compared.facts()
    report.table(models_table(models))
    sizes = {one.name: (one.disk_bytes / 1e6, one.bits_per_byte) for one in models}
    speed = {one.name: (one.writing, one.bits_per_byte) for one in models}
    caption = "Size against quality. Nearer to the lower left is better."
    report.chart(Points(sizes, "MB on disk", "bits per byte"), caption, "size")
    caption = "Speed against quality. Nearer to the lower right is better."
    report.chart(Points(speed, "tokens per second, one after another", "bits per byte"), caption, "speed")
    report.text(
        f"Sizes are those of the files of weights, with the base of an adapter. Reading is {FORWARD} tokens at once, "
        f"writing {STEPS} tokens one after another, both of the plain model without kernels, on {compared.device}: "
        "compare speeds that were measured on an idle machine. ± is one standard error over the documents of the text."
    )
    files = {"The scores, document by document": f"{SCORES}/results.html", "The table as CSV": f"{NAME}.csv"}
    return report.links(files)


def not_surpassed(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names whose point no other is below or at in both values, and below in one; from the smallest on."""

    def surpassed(own: tuple[float, float]) -> bool:
        return any(other[0] <= own[0] and other[1] <= own[1] and other != own for other in points.values())

    return sorted((name for name, point in points.items() if not surpassed(point)), key=lambda name: points[name])
