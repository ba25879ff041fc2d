"""The report of a selection: the table as CSV, the plots as PNG, and a page with both."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from braidlm.core.errors import BraidError
from braidlm.core.files import atomic_folder, write_text
from braidlm.core.report import figures
from braidlm.core.report.page import Page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from braidlm.edits.selecting.selection import Selection

PAGE = "select.html"
FILES = {PAGE, "layers.csv", "perplexity.png", "change.png"}


def check_report(out: str | Path) -> None:
    """Raise an error if the report could not be written: a folder of other files, or no matplotlib."""
    figures.check_drawing()
    out = Path(out)
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= FILES):
        raise BraidError(
            "this exists already and is not a report of `braid edit select`", str(out), "Choose another folder."
        )


def write_report(selection: "Selection", out: str | Path) -> Path:
    """Write everything in one step, replacing an older report."""
    drawn = selection_figures(selection)
    with atomic_folder(out, replace=True) as folder:
        write_text(folder / "layers.csv", _csv(selection))
        for name, figure in drawn.items():
            figures.save_png(figure, folder / f"{name}.png")
        _page(selection, drawn).write(folder / PAGE)
    return Path(out) / PAGE


def selection_figures(selection: "Selection") -> dict[str, "Figure"]:
    """The perplexity of every gated layer's output without and with its gate, and what the gate changes of it."""
    layers, lenses = list(selection.lenses), list(selection.lenses.values())
    sides = {
        "without its gate": (layers, [lens.perplexity_without for lens in lenses]),
        "with its gate": (layers, [lens.perplexity for lens in lenses]),
    }
    changes = {"change": (layers, [lens.change for lens in lenses])}
    return {
        "perplexity": figures.line_chart(sides, "layer", "perplexity through the head", log_y=True),
        "change": figures.line_chart(changes, "layer", "change by the gate, nats per token", levels={"none": 0.0}),
    }


def _page(selection: "Selection", drawn: dict[str, "Figure"]) -> Page:
    page = Page("Which gates stay", selection.headline())
    page.facts(
        {
            "gates": len(selection.verdicts),
            "stay": len(selection.kept),
            "bits per byte before": f"{selection.before.bits_per_byte:.4f}",
            "after": f"{selection.after.bits_per_byte:.4f}",
        }
    )
    page.text(
        "The stream after each gated layer is read by the last norm and the head, as if the model ended there, once "
        "without and once with what the layer's gate adds. The difference decides which gates stay; the key "
        "figures above are of the whole model on the same text."
    )
    page.figure(figures.to_svg(drawn["perplexity"]), "Perplexity of the calibration text, read after each layer.")
    page.figure(
        figures.to_svg(drawn["change"]), "What each gate changes of the perplexity's logarithm; below zero it helps."
    )
    rows = [
        [verdict.layer, *selection.numbers(verdict.layer), verdict.word, verdict.reason]
        for verdict in selection.verdicts
    ]
    page.table(["layer", "perplexity without", "with its gate", "change", "", "why"], rows)
    return page


def _csv(selection: "Selection") -> str:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["layer", "perplexity_without", "perplexity", "change", "stays", "reason"])
    for verdict in selection.verdicts:
        lens = selection.lenses.get(verdict.layer)
        numbers = [] if lens is None else [lens.perplexity_without, lens.perplexity, lens.change]
        cells = [f"{number:.6g}" for number in numbers] or [""] * 3
        writer.writerow([verdict.layer, *cells, str(verdict.stays).lower(), verdict.reason])
    return table.getvalue()
